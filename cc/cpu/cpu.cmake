# The CPU platform: built where the package onednn-devel-cpu-gomp provides oneDNN.
jaxconv_python(
  ONEDNN_HEADER
  "import importlib.metadata as m; print(next(f.locate().resolve() for f in m.files('onednn-devel-cpu-gomp') if f.name == 'dnnl.h' and f.parent.name == 'include'))"
)
jaxconv_python(
  ONEDNN_LIBRARY
  "import importlib.metadata as m; print(next(f.locate().resolve() for f in m.files('onednn-cpu-gomp') if f.name.startswith('libdnnl.so.')))"
)
if(ONEDNN_HEADER AND ONEDNN_LIBRARY)
  get_filename_component(ONEDNN_INCLUDE "${ONEDNN_HEADER}" DIRECTORY)
  jaxconv_kept(ONEDNN_INCLUDE "${ONEDNN_INCLUDE}" "dnnl*")
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  jaxconv_platform(cpu CpuPlatform ${JAXCONV_CPU_SOURCES})
  target_include_directories(jaxconv_cpu SYSTEM PRIVATE "${ONEDNN_INCLUDE}")
  # Not linked with oneDNN, whose pip package lies on no rpath: jaxconv._src.library.native opens it
  # first, and its symbols are known to the loader. A wheel then names no library that systems lack.
  target_link_libraries(jaxconv_cpu PRIVATE OpenMP::OpenMP_CXX)
  if(JAXCONV_BUNDLE_OPENMP)
    # Under its own name, which oneDNN needs too: auditwheel would rename the copy, and a process have
    # two OpenMP runtimes. jaxconv._src.native opens it where the machine has none.
    install(FILES "${JAXCONV_BUNDLE_OPENMP}" DESTINATION ${JAXCONV_INSTALL_DIR} RENAME libgomp.so.1)
  endif()
  set(JAXCONV_CPU_REPORT "CPU kernels: built on oneDNN (${ONEDNN_LIBRARY})")
else()
  set(JAXCONV_CPU_REPORT
      "CPU kernels: not built, the package onednn-devel-cpu-gomp is not installed (Linux on x86-64 only); convolutions go to XLA")
endif()
