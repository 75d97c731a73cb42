#include "cuda/common/pass.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "cuda/common/rates.h"

namespace jaxconv {

Status PassKey::Parse(std::string_view text, PassKey* key) {
  key->words_.clear();
  std::istringstream stream{std::string(text)};
  for (std::string word; stream >> word;) key->words_.push_back(word);
  const std::string dtype = key->words_.size() < 2 ? "" : key->words_[1];
  for (const DType known : {DType::kF32, DType::kBF16, DType::kF16}) {
    key->dtype_ = known;
    if (dtype == Name(known)) return {};
  }
  if (key->words_.size() < 2) {
    return Status::InvalidArgument("expected a pass and a type, got '" + std::string(text) + "'");
  }
  return Status::Unimplemented("expected float32, float16 or bfloat16, got " + dtype);
}

bool PassKey::Has(std::string_view word) const {
  return std::find(words_.begin() + 2, words_.end(), word) != words_.end();
}

std::vector<int64_t> PassKey::Extents(char letter) const {
  for (size_t i = 2; i < words_.size(); ++i) {
    const std::string& word = words_[i];
    if (word[0] != letter || word.size() < 2) continue;
    std::vector<int64_t> found;
    size_t at = 0;
    while (at < word.size() && (at == 0 || word[at] == 'x')) {
      int64_t number = 0;
      const size_t first = ++at;
      while (at < word.size() && std::isdigit(static_cast<unsigned char>(word[at]))) {
        number = number * 10 + (word[at++] - '0');
      }
      // 18 digits cannot overflow.
      if (at == first || at - first > 18) break;
      found.push_back(number);
      if (at == word.size()) return found;
    }
  }
  return {};
}

int64_t PassKey::Number(char letter, int64_t otherwise) const {
  const std::vector<int64_t> found = Extents(letter);
  return found.size() == 1 ? found[0] : otherwise;
}

std::string_view PassKey::Behind(std::string_view prefix) const {
  for (const std::string& word : words_) {
    if (word.compare(0, prefix.size(), prefix) == 0) {
      return std::string_view(word).substr(prefix.size());
    }
  }
  return {};
}

const PassKernel* FindForm(const std::vector<PassKernel>& kernels, std::string_view pass,
                           DType dtype, const PassForm& form, bool sm90) {
  const PassKernel* found = nullptr;
  for (const PassKernel& kernel : kernels) {
    if (kernel.pass != pass || kernel.dtype != dtype || kernel.form != form) continue;
    if (kernel.sm90 ? sm90 : found == nullptr) found = &kernel;
  }
  return found;
}

double PassMicroseconds(const PassCost& cost, const Gpu& gpu) {
  const double cycles = gpu.cycles_per_us(), sms = gpu.sm_count;
  // The last wave of CTAs leaves some SMs idle.
  const double resident = sms * cost.ctas_of_sm, ctas = static_cast<double>(cost.ctas);
  const double waves = std::max(1.0, ctas / resident);
  const double busy = std::min(sms, ctas / waves);
  const double dram = cost.bytes / gpu.dram_bytes_per_us;
  const double loads = cost.bytes / (busy * kStoreBytesPerCycle * cycles);
  const double issue = cost.instructions / (busy * gpu.fma_per_clock * cycles);
  return gpu.launch_us + std::max({dram, loads, issue});
}

Status CheckAligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) {
      return Status::Unimplemented("an array does not lie on a multiple of 16 bytes");
    }
  }
  return {};
}

}  // namespace jaxconv
