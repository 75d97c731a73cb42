# The sources of the CUDA backend. JAXCONV_CUDA_HOST_SOURCES are plain C++ without CUDA headers, so that
# tests/cc/select_test.cc links them with launches of its own.
set(JAXCONV_CUDA_HOST_SOURCES
    cc/cuda/kernels/igemm_simt.cc
    cc/cuda/kernels/igemm_wmma.cc
    cc/cuda/kernels/kernel_table.cc
    cc/cuda/select/cost_model.cc
    cc/cuda/select/device_info.cc
    cc/cuda/select/select.cc)
set(JAXCONV_CUDA_DEVICE_SOURCES
    cc/cuda/kernels/query_device.cu
    cc/cuda/kernels/splitk_reduce.cu)
foreach(op fprop dgrad wgrad)
  foreach(dtype f32 f16 bf16)
    list(APPEND JAXCONV_CUDA_DEVICE_SOURCES
         cc/cuda/kernels/instances/igemm_simt_${op}_${dtype}.cu)
    foreach(tiles large small thin)
      list(APPEND JAXCONV_CUDA_DEVICE_SOURCES
           cc/cuda/kernels/instances/igemm_wmma_${op}_${dtype}_${tiles}.cu)
    endforeach()
  endforeach()
  foreach(dtype f16 bf16)
    list(APPEND JAXCONV_CUDA_DEVICE_SOURCES
         cc/cuda/kernels/instances/igemm_wmma_${op}_${dtype}_narrow.cu)
  endforeach()
endforeach()
