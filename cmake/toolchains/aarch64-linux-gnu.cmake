# 64-bit Arm on Linux with the distribution's cross compiler; programs run under qemu's user-mode emulation.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

# Static programs need no target root for the emulator to find a loader in.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
find_program(TURBOQUANT_QEMU_AARCH64 NAMES qemu-aarch64-static qemu-aarch64)
mark_as_advanced(TURBOQUANT_QEMU_AARCH64)
if(TURBOQUANT_QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${TURBOQUANT_QEMU_AARCH64} -cpu max)
endif()
