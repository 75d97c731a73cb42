# The sources of the CUDA backend. JAXCONV_CUDA_HOST_SOURCES are plain C++ without CUDA headers, so that
# tests/cc/select_test.cc links them with launches of its own.
set(JAXCONV_CUDA_HOST_SOURCES
    cc/cuda/kernels/igemm_simt.cc
    cc/cuda/kernels/igemm_wgmma.cc
    cc/cuda/kernels/igemm_wmma.cc
    cc/cuda/kernels/igemm_wmma_patch.cc
    cc/cuda/kernels/kernel_table.cc
    cc/cuda/kernels/padded_channels.cc
    cc/cuda/select/cost_model.cc
    cc/cuda/select/device_info.cc
    cc/cuda/select/select.cc
    cc/cuda/select/wgmma_cost.cc)
set(JAXCONV_CUDA_DEVICE_SOURCES
    cc/cuda/kernels/filter_transpose.cu
    cc/cuda/kernels/pitched_copy.cu
    cc/cuda/kernels/query_device.cu
    cc/cuda/kernels/splitk_reduce.cu
    cc/cuda/kernels/tensor_map.cu)
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
    foreach(tiles narrow patch)
      list(APPEND JAXCONV_CUDA_DEVICE_SOURCES
           cc/cuda/kernels/instances/igemm_wmma_${op}_${dtype}_${tiles}.cu)
    endforeach()
  endforeach()
endforeach()
# Files named _sm90 are compiled for sm_90a alone: wgmma and setmaxnreg exist nowhere else.
set(JAXCONV_CUDA_SM90_SOURCES
    cc/cuda/kernels/wgmma_draw_reset_sm90.cu
    cc/cuda/kernels/instances/igemm_wgmma_wgrad_f32_mma_sm90.cu)
foreach(op fprop dgrad)
  foreach(tiles large pingpong rows)
    list(APPEND JAXCONV_CUDA_SM90_SOURCES
         cc/cuda/kernels/instances/igemm_wgmma_${op}_f32_${tiles}_sm90.cu)
  endforeach()
endforeach()
foreach(op fprop dgrad wgrad)
  foreach(dtype f16 bf16)
    foreach(tiles large medium pingpong rows)
      list(APPEND JAXCONV_CUDA_SM90_SOURCES
           cc/cuda/kernels/instances/igemm_wgmma_${op}_${dtype}_${tiles}_sm90.cu)
    endforeach()
    if(NOT op STREQUAL "wgrad")
      foreach(tiles columns one_tap cluster)
        list(APPEND JAXCONV_CUDA_SM90_SOURCES
             cc/cuda/kernels/instances/igemm_wgmma_${op}_${dtype}_${tiles}_sm90.cu)
      endforeach()
    endif()
  endforeach()
endforeach()
