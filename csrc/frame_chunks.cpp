// Chunks of CPython's stack of frames, kept when they are given back.
//
// CPython keeps the frames of Python's functions in chunks of 16 KB. It asks the kernel for one whenever a call crosses
// the end of the last, and gives it back when that call returns. Where that is a call that each layer or each step makes,
// it pays for two system calls, for pages that have to be touched first, and for the other threads' cores being told:
// 60 to 100 us were measured with two threads.

#include "bindings.h"

#include <atomic>

namespace hypic {
namespace {

constexpr size_t CHUNK_BYTES = 16 << 10;

PyObjectArenaAllocator stock;
// Chunks that nobody uses. A thread may end without Python's lock, hence atomic.
std::atomic<void*> kept[16];

void* take(void*, size_t bytes) {
  if (bytes == CHUNK_BYTES)
    for (auto& slot : kept)
      if (void* chunk = slot.exchange(nullptr)) return chunk;
  return stock.alloc(stock.ctx, bytes);
}

void give_back(void*, void* chunk, size_t bytes) {
  if (bytes == CHUNK_BYTES)
    for (auto& slot : kept)
      if (void* none = nullptr; slot.compare_exchange_strong(none, chunk)) return;
  stock.free(stock.ctx, chunk, bytes);
}

void keep_frame_chunks() {
  PyObjectArenaAllocator now;
  PyObject_GetArenaAllocator(&now);
  if (now.alloc == take) return;
  stock = now;
  now = {nullptr, take, give_back};
  PyObject_SetArenaAllocator(&now);
}

}  // namespace

void bind_frame_chunks(pybind11::module_& module) {
  module.def("keep_frame_chunks", keep_frame_chunks,
             "From now on this process keeps up to 16 chunks of frames. Idempotent.");
}

}  // namespace hypic
