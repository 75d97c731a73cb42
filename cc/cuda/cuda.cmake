# The CUDA platform. JAXCONV_CUDA=AUTO builds it when this machine has an NVIDIA driver and nvcc.
set(JAXCONV_BUILD_CUDA OFF)
if(JAXCONV_CUDA STREQUAL "OFF")
  set(JAXCONV_CUDA_REPORT "CUDA kernels: not built, JAXCONV_CUDA=OFF")
else()
  # nvcc: $CUDACXX, $CUDA_HOME, PATH, the usual folder, or NVIDIA's pip packages, which the build
  # backend (tools/build_backend) asks for where none of the others exists.
  jaxconv_python(
    pip_folders
    "import glob, importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(f for p in s.submodule_search_locations for f in glob.glob(p + '/*/bin')))"
  )
  unset(JAXCONV_NVCC_EXECUTABLE CACHE)  # another isolated build has its packages elsewhere
  if(JAXCONV_NVCC STREQUAL "pip")
    find_program(JAXCONV_NVCC_EXECUTABLE nvcc PATHS ${pip_folders} NO_DEFAULT_PATH)
  elseif(JAXCONV_NVCC OR NOT "$ENV{CUDACXX}" STREQUAL "")
    set(nvcc "${JAXCONV_NVCC}")
    if(NOT nvcc)
      set(nvcc "$ENV{CUDACXX}")
    endif()
    find_program(JAXCONV_NVCC_EXECUTABLE "${nvcc}")
    if(NOT JAXCONV_NVCC_EXECUTABLE)
      message(FATAL_ERROR "jaxconv: JAXCONV_NVCC or CUDACXX: no such program: '${nvcc}'")
    endif()
  else()
    find_program(JAXCONV_NVCC_EXECUTABLE nvcc HINTS "$ENV{CUDA_HOME}/bin"
                                              PATHS /usr/local/cuda/bin ${pip_folders})
  endif()
  set(driver OFF)
  if(EXISTS /proc/driver/nvidia/version OR EXISTS /dev/nvidiactl)
    set(driver ON)
  else()
    find_program(JAXCONV_NVIDIA_SMI nvidia-smi)
    if(JAXCONV_NVIDIA_SMI)
      set(driver ON)
    endif()
  endif()
  string(CONCAT no_nvcc
         "nvcc is not on PATH, in CUDA_HOME or among the pip packages. An isolated build brings "
         "NVIDIA's packages along where the driver is of the 580 series or newer; an older one needs "
         "a toolkit of CUDA 12, and a build without isolation `pip install nvidia-cuda-nvcc==13.0.* "
         "nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-runtime==13.0.* "
         "nvidia-cuda-cccl==13.0.*`")
  if(JAXCONV_CUDA STREQUAL "ON")
    if(NOT JAXCONV_NVCC_EXECUTABLE)
      message(FATAL_ERROR "jaxconv: JAXCONV_CUDA=ON, but ${no_nvcc}")
    endif()
    set(JAXCONV_BUILD_CUDA ON)
  elseif(NOT JAXCONV_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "jaxconv: JAXCONV_CUDA: expected AUTO, ON or OFF, got '${JAXCONV_CUDA}'")
  elseif(NOT driver)
    set(JAXCONV_CUDA_REPORT
        "CUDA kernels: not built, no NVIDIA driver on this machine (force with JAXCONV_CUDA=ON)")
  elseif(NOT JAXCONV_NVCC_EXECUTABLE)
    set(JAXCONV_CUDA_REPORT
        "CUDA kernels: not built, an NVIDIA driver is present but ${no_nvcc}")
  else()
    set(JAXCONV_BUILD_CUDA ON)
  endif()
endif()

if(JAXCONV_BUILD_CUDA)
  set(CMAKE_CUDA_COMPILER "${JAXCONV_NVCC_EXECUTABLE}")
  set(CMAKE_CUDA_ARCHITECTURES ${JAXCONV_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  # nvcc tells the linker that the CUDA runtime is in lib64; the pip packages have it in lib.
  get_filename_component(toolkit "${JAXCONV_NVCC_EXECUTABLE}" DIRECTORY)
  get_filename_component(toolkit "${toolkit}" DIRECTORY)
  set(runtime_folder)
  if(EXISTS "${toolkit}/lib/libcudart_static.a" AND NOT EXISTS "${toolkit}/lib64")
    set(runtime_folder "${toolkit}/lib")
    # For the programs with which CMake tries the compiler.
    set(ENV{LIBRARY_PATH} "${runtime_folder}:$ENV{LIBRARY_PATH}")
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)

  include(cuda/sources.cmake)
  jaxconv_platform(cuda CudaPlatform ${JAXCONV_CUDA_SOURCES})
  if(runtime_folder)
    # Not as a link directory: CMake takes those of LIBRARY_PATH for the linker's own.
    target_link_options(jaxconv_cuda PRIVATE "-L${runtime_folder}")
  endif()
  # CUDA_ARCHITECTURES belongs to a target: an object library for the architecture of its own.
  add_library(jaxconv_cuda_sm90 OBJECT ${JAXCONV_CUDA_SM90_SOURCES})
  jaxconv_include(jaxconv_cuda_sm90)
  set_target_properties(jaxconv_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_sources(jaxconv_cuda PRIVATE $<TARGET_OBJECTS:jaxconv_cuda_sm90>)
  # A register spill, or a wgmma that ptxas serialises, is an error: kernels are measured without.
  # The library has PTX of the portable sources, for which fail_on_spills.py says why not by ptxas.
  set(line_info)
  if(JAXCONV_LINE_INFO)
    set(line_info -lineinfo)
  endif()
  # A third less for a wheel. Every driver of CUDA 13 reads it.
  set(compressed)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(compressed --compress-mode=size)
  endif()
  foreach(target jaxconv_cuda jaxconv_cuda_sm90)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG ${line_info} ${compressed}
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
    cuda/devices.cc
    PROPERTIES COMPILE_DEFINITIONS
               "JAXCONV_CUDA_VERSION=\"${CMAKE_CUDA_COMPILER_VERSION}\";JAXCONV_CUDA_ARCHITECTURES=\"${JAXCONV_CUDA_ARCHITECTURES}\""
  )
  set(JAXCONV_CUDA_REPORT
      "CUDA kernels: built with nvcc ${CMAKE_CUDA_COMPILER_VERSION} for sm_${JAXCONV_CUDA_ARCHITECTURES} and newer, and sm_90a (JAXCONV_CUDA=${JAXCONV_CUDA})"
  )
  if(NOT JAXCONV_CUDA_INSTANCES STREQUAL "ALL")
    string(APPEND JAXCONV_CUDA_REPORT
           ", of which most tiles are left out (JAXCONV_CUDA_INSTANCES=${JAXCONV_CUDA_INSTANCES})")
  endif()
endif()
