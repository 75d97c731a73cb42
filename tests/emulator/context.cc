#include "context.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

#if !defined(__x86_64__)
#error "a switch of fibers is written for x86-64 only"
#endif

asm(R"(
.text
.globl jaxconv_emulator_switch
.type jaxconv_emulator_switch, @function
jaxconv_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size jaxconv_emulator_switch, .-jaxconv_emulator_switch
)");
extern "C" void jaxconv_emulator_switch(void** save, void* load);

namespace emulator {

void Prepare(Context* context, unsigned char* stack, void (*entry)()) {
  // The thread that used this stack before never returned from its frames.
  ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes);
  auto** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // no return address; aligns the stack as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context->stack_pointer = top;
}

void SwitchContext(Context* from, Context* to) {
  jaxconv_emulator_switch(&from->stack_pointer, to->stack_pointer);
}

}  // namespace emulator
