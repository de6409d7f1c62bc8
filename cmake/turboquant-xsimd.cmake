# Finds xsimd 8.1 or later and defines turboquant::xsimd, which carries its include directory and nothing else;
# on failure turboquant_xsimd_problem says what is missing. Used by our build and by the installed package.
#
# xsimd's own target and version file are not relied on: Debian's 8.1 asks to link a library "xtl" that does not exist,
# and version files refuse any major version but the one asked for.

set(turboquant_xsimd_problem "")
if(TARGET turboquant::xsimd)
  return()
endif()

if(NOT TARGET xsimd AND NOT TARGET xsimd::xsimd)
  find_package(xsimd CONFIG QUIET)
endif()
set(turboquant_xsimd_include "")
foreach(candidate IN ITEMS xsimd xsimd::xsimd)
  if(TARGET ${candidate} AND NOT turboquant_xsimd_include)
    get_target_property(turboquant_xsimd_include ${candidate} INTERFACE_INCLUDE_DIRECTORIES)
    string(REGEX REPLACE "\\$<INSTALL_INTERFACE:[^>]*>" "" turboquant_xsimd_include "${turboquant_xsimd_include}")
    string(REGEX REPLACE "\\$<BUILD_INTERFACE:([^>]*)>" "\\1" turboquant_xsimd_include "${turboquant_xsimd_include}")
    list(FILTER turboquant_xsimd_include EXCLUDE REGEX "^$|NOTFOUND$")
  endif()
endforeach()
if(NOT turboquant_xsimd_include)
  # Header-only, so the files for another architecture serve as well.
  find_path(TURBOQUANT_XSIMD_INCLUDE_DIR xsimd/config/xsimd_config.hpp)
  mark_as_advanced(TURBOQUANT_XSIMD_INCLUDE_DIR)
  if(TURBOQUANT_XSIMD_INCLUDE_DIR)
    set(turboquant_xsimd_include ${TURBOQUANT_XSIMD_INCLUDE_DIR})
  endif()
endif()

set(turboquant_xsimd_config "")
foreach(folder IN LISTS turboquant_xsimd_include)
  if(EXISTS ${folder}/xsimd/config/xsimd_config.hpp)
    set(turboquant_xsimd_config ${folder}/xsimd/config/xsimd_config.hpp)
    set(turboquant_xsimd_include ${folder})
    break()
  endif()
endforeach()
if(NOT turboquant_xsimd_config)
  string(CONCAT turboquant_xsimd_problem "xsimd 8.1 or later was not found (Debian, Ubuntu: libxsimd-dev). "
         "Install it, set xsimd_ROOT, or let TURBOQUANT_FETCH=ON download it.")
  return()
endif()
set(turboquant_xsimd_version "")
foreach(part IN ITEMS MAJOR MINOR PATCH)
  file(STRINGS ${turboquant_xsimd_config} line REGEX "define XSIMD_VERSION_${part} ")
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND turboquant_xsimd_version "${number}")
endforeach()
list(JOIN turboquant_xsimd_version . turboquant_xsimd_version)
if(turboquant_xsimd_version VERSION_LESS 8.1)
  set(turboquant_xsimd_problem
      "xsimd 8.1 or later is needed, found ${turboquant_xsimd_version} in ${turboquant_xsimd_include}")
  return()
endif()

if(CMAKE_CROSSCOMPILING)
  # The host's include directory must not come before the headers of the target's compiler.
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/turboquant-xsimd)
  file(CREATE_LINK ${turboquant_xsimd_include}/xsimd ${CMAKE_BINARY_DIR}/turboquant-xsimd/xsimd SYMBOLIC)
  set(turboquant_xsimd_include ${CMAKE_BINARY_DIR}/turboquant-xsimd)
endif()
add_library(turboquant::xsimd INTERFACE IMPORTED GLOBAL)
set_target_properties(turboquant::xsimd PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${turboquant_xsimd_include}")
