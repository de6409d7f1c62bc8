# Headers, the exported target and the package files, all independent of the architecture.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_DATADIR}/cmake/turboquant)
install(DIRECTORY include/turboquant DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(TARGETS turboquant EXPORT turboquant-targets)
install(EXPORT turboquant-targets NAMESPACE turboquant:: DESTINATION ${package_dir})

configure_package_config_file(cmake/turboquant-config.cmake.in ${PROJECT_BINARY_DIR}/turboquant-config.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/turboquant-config-version.cmake
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/turboquant-config.cmake ${PROJECT_BINARY_DIR}/turboquant-config-version.cmake
        DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
