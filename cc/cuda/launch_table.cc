#include "cuda/launch_table.h"

#include <unordered_map>

#include "cuda/common/instances.h"

namespace jaxconv {

// The launches that JAXCONV_INSTANCE defines in the generated translation units.
#define JAXCONV_DECLARE(op, dtype, variant) \
  Status JAXCONV_LAUNCH(op, JAXCONV_FAMILY, dtype, variant)(const Plan&, const Operands&, void*);
#define KERNEL(ops, types, variant, ...) JAXCONV_FOR_EACH(ops, types, JAXCONV_DECLARE, variant)
#define PADDED(ops, types, variant)
#define JAXCONV_DECLARE_FUSED(op, dtype, variant) JAXCONV_DECLARE(op, dtype, variant##_fused)
#define FUSED(ops, types, variant) JAXCONV_FOR_EACH(ops, types, JAXCONV_DECLARE_FUSED, variant)
#include "cuda/families.def"

LaunchFunction FindLaunch(std::string_view name) {
#define JAXCONV_ENTRY(op, dtype, variant)            \
  {JAXCONV_NAME(op, JAXCONV_FAMILY, dtype, variant), \
   JAXCONV_LAUNCH(op, JAXCONV_FAMILY, dtype, variant)},
#define JAXCONV_PADDED_ENTRY(op, dtype, variant) \
  {JAXCONV_NAME(op, JAXCONV_FAMILY, dtype, variant) "_padded", LaunchPadded},
#define JAXCONV_FUSED_ENTRY(op, dtype, variant) JAXCONV_ENTRY(op, dtype, variant##_fused)
  static const std::unordered_map<std::string_view, LaunchFunction> table = {
#define KERNEL(ops, types, variant, ...) JAXCONV_FOR_EACH(ops, types, JAXCONV_ENTRY, variant)
#define PADDED(ops, types, variant) JAXCONV_FOR_EACH(ops, types, JAXCONV_PADDED_ENTRY, variant)
#define FUSED(ops, types, variant) JAXCONV_FOR_EACH(ops, types, JAXCONV_FUSED_ENTRY, variant)
#include "cuda/families.def"
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace jaxconv
