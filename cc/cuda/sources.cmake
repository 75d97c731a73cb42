# The sources of the CUDA platform. A family's instances come from its table, kernels.def: this file
# makes their translation units. JAXCONV_CUDA_SOURCES are portable, JAXCONV_CUDA_SM90_SOURCES are for
# sm_90a alone: wgmma and setmaxnreg exist nowhere else, and their headers are named so.

# Instances of one device kernel, operation and type that share a translation unit: more save the
# time to read the headers, fewer spread over more cores.
set(JAXCONV_INSTANCES_OF_UNIT 4)

set(JAXCONV_CUDA_SOURCES)
set(JAXCONV_CUDA_SM90_SOURCES)

# Writes the translation units of one family and appends them to the lists above. A line of the table
# is KERNEL(ops, types, variant, header, ...) (cuda/common/instances.h).
function(jaxconv_cuda_instances family)
  set(table "${PROJECT_SOURCE_DIR}/cc/cuda/${family}/kernels.def")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${table}")
  file(READ "${table}" text)
  string(REGEX REPLACE "//[^\n]*" "" text "${text}")
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  string(REPLACE "KERNEL(" ";KERNEL(" text "${text}")
  string(REPLACE "PADDED(" ";PADDED(" text "${text}")
  set(units)
  foreach(call IN LISTS text)
    string(STRIP "${call}" call)
    if(NOT call MATCHES "^KERNEL")
      continue()
    endif()
    if(NOT call MATCHES
       "^KERNEL\\( ?([A-Z0-9_]+), ?([A-Z0-9_]+), ?([0-9][A-Za-z0-9_]*), ?([a-z0-9_]+), ?(.*)\\)$")
      message(FATAL_ERROR "jaxconv: ${table}: cannot read '${call}'")
    endif()
    set(variant "${CMAKE_MATCH_3}")
    set(header "${CMAKE_MATCH_4}")
    set(arguments "${CMAKE_MATCH_5}")
    string(TOLOWER "${CMAKE_MATCH_1}" ops)
    string(TOLOWER "${CMAKE_MATCH_2}" dtypes)
    string(REPLACE "_" ";" ops "${ops}")
    string(REPLACE "_" ";" dtypes "${dtypes}")
    foreach(op IN LISTS ops)
      foreach(dtype IN LISTS dtypes)
        set(key "${header}_${op}_${dtype}")
        if(NOT DEFINED count_${key})
          set(count_${key} 0)
        endif()
        math(EXPR part "${count_${key}} / ${JAXCONV_INSTANCES_OF_UNIT}")
        math(EXPR count_${key} "${count_${key}} + 1")
        # Files for sm_90a keep that at the end of their names.
        set(unit "${op}_${dtype}_${part}_${header}")
        if(NOT unit IN_LIST units)
          list(APPEND units "${unit}")
          set(text_${unit} "#include \"cuda/common/instances.h\"\n")
          string(APPEND text_${unit} "#include \"cuda/${family}/${header}.cuh\"\n\n")
          string(APPEND text_${unit} "namespace jaxconv {\n")
        endif()
        string(APPEND text_${unit}
               "JAXCONV_INSTANCE(${op}, ${family}, ${dtype}, ${variant}, ${arguments})\n")
      endforeach()
    endforeach()
  endforeach()
  foreach(unit IN LISTS units)
    set(file "${CMAKE_CURRENT_BINARY_DIR}/${family}/${unit}.cu")
    file(CONFIGURE OUTPUT "${file}" CONTENT "${text_${unit}}}  // namespace jaxconv\n" @ONLY)
    if(unit MATCHES "_sm90$")
      list(APPEND JAXCONV_CUDA_SM90_SOURCES "${file}")
    else()
      list(APPEND JAXCONV_CUDA_SOURCES "${file}")
    endif()
  endforeach()
  set(JAXCONV_CUDA_SOURCES "${JAXCONV_CUDA_SOURCES}" PARENT_SCOPE)
  set(JAXCONV_CUDA_SM90_SOURCES "${JAXCONV_CUDA_SM90_SOURCES}" PARENT_SCOPE)
endfunction()

# The slow ones first.
jaxconv_cuda_instances(igemm_wmma)
jaxconv_cuda_instances(igemm_simt)
jaxconv_cuda_instances(igemm_wgmma)
jaxconv_cuda_instances(few_channels)

# Everything else.
file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cc/cuda/*.cc"
     "${PROJECT_SOURCE_DIR}/cc/cuda/*.cu")
foreach(source IN LISTS sources)
  if(source MATCHES "_sm90\\.cu$")
    list(APPEND JAXCONV_CUDA_SM90_SOURCES "${source}")
  else()
    list(APPEND JAXCONV_CUDA_SOURCES "${source}")
  endif()
endforeach()
