# The CUDA platform. JAXCONV_CUDA=AUTO builds it when this machine has an NVIDIA driver and nvcc.
set(JAXCONV_BUILD_CUDA OFF)
if(JAXCONV_CUDA STREQUAL "OFF")
  set(JAXCONV_CUDA_REPORT "CUDA kernels: not built, JAXCONV_CUDA=OFF")
else()
  # nvcc: CUDACXX, PATH, CUDA_HOME, the usual folder, or NVIDIA's pip packages.
  jaxconv_python(
    JAXCONV_NVIDIA_PACKAGES
    "import sysconfig, glob; print(';'.join(glob.glob(sysconfig.get_path('platlib') + '/nvidia/*/bin')))"
  )
  find_program(JAXCONV_NVCC nvcc
               HINTS "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin
                     ${JAXCONV_NVIDIA_PACKAGES})
  set(driver OFF)
  if(EXISTS /proc/driver/nvidia/version OR EXISTS /dev/nvidiactl)
    set(driver ON)
  else()
    find_program(JAXCONV_NVIDIA_SMI nvidia-smi)
    if(JAXCONV_NVIDIA_SMI)
      set(driver ON)
    endif()
  endif()
  if(JAXCONV_CUDA STREQUAL "ON")
    if(NOT JAXCONV_NVCC)
      message(FATAL_ERROR "jaxconv: JAXCONV_CUDA=ON, but nvcc is not on PATH, in CUDA_HOME or among "
                          "the pip packages (nvidia-cuda-nvcc)")
    endif()
    set(JAXCONV_BUILD_CUDA ON)
  elseif(NOT JAXCONV_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "jaxconv: JAXCONV_CUDA: expected AUTO, ON or OFF, got '${JAXCONV_CUDA}'")
  elseif(NOT driver)
    set(JAXCONV_CUDA_REPORT
        "CUDA kernels: not built, no NVIDIA driver on this machine (force with JAXCONV_CUDA=ON)")
  elseif(NOT JAXCONV_NVCC)
    set(JAXCONV_CUDA_REPORT
        "CUDA kernels: not built, an NVIDIA driver is present but nvcc is not found (PATH, CUDA_HOME, pip)"
    )
  else()
    set(JAXCONV_BUILD_CUDA ON)
  endif()
endif()

if(JAXCONV_BUILD_CUDA)
  set(CMAKE_CUDA_COMPILER "${JAXCONV_NVCC}")
  set(CMAKE_CUDA_ARCHITECTURES ${JAXCONV_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)

  include(cuda/sources.cmake)
  jaxconv_platform(cuda CudaPlatform ${JAXCONV_CUDA_SOURCES})
  # CUDA_ARCHITECTURES belongs to a target: an object library for the architecture of its own.
  add_library(jaxconv_cuda_sm90 OBJECT ${JAXCONV_CUDA_SM90_SOURCES})
  jaxconv_include(jaxconv_cuda_sm90)
  set_target_properties(jaxconv_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_sources(jaxconv_cuda PRIVATE $<TARGET_OBJECTS:jaxconv_cuda_sm90>)
  # A register spill, or a wgmma that ptxas serialises, is an error: kernels are measured without.
  # The library has PTX of the portable sources, for which fail_on_spills.py says why not by ptxas.
  foreach(target jaxconv_cuda jaxconv_cuda_sm90)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG -lineinfo
                                             -Xptxas=--warn-on-spills>)
  endforeach()
  target_compile_options(jaxconv_cuda_sm90
                         PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warning-as-error>)
  set_target_properties(
    jaxconv_cuda
    PROPERTIES CUDA_COMPILER_LAUNCHER
               "${Python_EXECUTABLE};${PROJECT_SOURCE_DIR}/cc/cuda/fail_on_spills.py"
  )
  set_source_files_properties(
    ffi/cuda_platform.cc
    PROPERTIES COMPILE_DEFINITIONS
               "JAXCONV_CUDA_VERSION=\"${CMAKE_CUDA_COMPILER_VERSION}\";JAXCONV_CUDA_ARCHITECTURES=\"${JAXCONV_CUDA_ARCHITECTURES}\""
  )
  set(JAXCONV_CUDA_REPORT
      "CUDA kernels: built with nvcc ${CMAKE_CUDA_COMPILER_VERSION} for sm_${JAXCONV_CUDA_ARCHITECTURES} and newer, and sm_90a (JAXCONV_CUDA=${JAXCONV_CUDA})"
  )
endif()
