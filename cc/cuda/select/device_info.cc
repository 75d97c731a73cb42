#include "cuda/select/device_info.h"

namespace jaxconv {

DeviceInfo PortableTarget(int cc_major, int cc_minor) {
  struct Known {
    int major, minor, sm_count;
    int64_t smem_kib, l2_mib;
  };
  // The vendor's figures of each capability's usual data-centre or desktop part. Shared memory is
  // the most that one block may ask for.
  static constexpr Known kKnown[] = {
      {8, 0, 108, 163, 40}, {8, 6, 84, 99, 6},      {8, 7, 16, 163, 4},   {8, 9, 128, 99, 72},
      {9, 0, 132, 227, 50}, {10, 0, 148, 227, 126}, {12, 0, 170, 99, 96},
  };
  // The nearest capability at or below; the oldest for anything older.
  const Known* best = &kKnown[0];
  for (const Known& known : kKnown) {
    if (known.major * 10 + known.minor <= cc_major * 10 + cc_minor) best = &known;
  }
  DeviceInfo info;
  info.name = "portable sm_" + std::to_string(cc_major) + std::to_string(cc_minor);
  info.cc_major = cc_major;
  info.cc_minor = cc_minor;
  info.sm_count = best->sm_count;
  info.smem_per_block_optin = best->smem_kib << 10;
  info.l2_bytes = best->l2_mib << 20;
  return info;
}

}  // namespace jaxconv
