# An overlay port: vcpkg install turboquant --overlay-ports=<checkout>/cmake/packaging/vcpkg builds that checkout. A
# registry replaces this line by its download.
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH SOURCE_PATH)
cmake_path(GET SOURCE_PATH PARENT_PATH SOURCE_PATH)
cmake_path(GET SOURCE_PATH PARENT_PATH SOURCE_PATH)

set(VCPKG_BUILD_TYPE release)  # headers only
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DTURBOQUANT_INSTALL=ON -DTURBOQUANT_BUILD_TESTS=OFF -DTURBOQUANT_BUILD_BENCH=OFF
          -DTURBOQUANT_BUILD_EXAMPLES=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/turboquant)
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc")
