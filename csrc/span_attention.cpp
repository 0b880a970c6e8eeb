// Launchers of span attention: checks, division into parts, threads, and merging of partial results.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "dispatch.h"

namespace hypic {
namespace {

using at::Tensor;

// Columns of one part. Fixed, so that a row's result depends neither on threads nor on who else is in the batch. Few
// rows wait for memory: theirs are short, so that what one kv head read is still near when the next one comes.
constexpr int64_t PART_COLUMNS = 4096, PART_COLUMNS_OF_FEW = 512;
// Rows of one part, times query heads per kv head: bounds the scratch memory.
constexpr int64_t PART_ROWS = 1024;

DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::f16;
    default: TORCH_CHECK_TYPE(false, name, " is ", t.scalar_type(), ": expected float32, bfloat16 or float16");
  }
}

void gemm_bf16(int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add, const uint16_t* A,
               const uint16_t* B, float* C) {
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, reinterpret_cast<const at::BFloat16*>(A),
                              reinterpret_cast<const at::BFloat16*>(B), C, true);
}

// oneDNN's batch-reduce GEMM uses AMX or AVX512-BF16, whichever the machine has (what has AMX has both).
GemmBf16 gemm_for(DType dtype) {
  return dtype == DType::bf16 && &kernels() == &kernels_avx512_bf16 ? gemm_bf16 : nullptr;
}

// Memory that is kept between calls: fresh pages for every layer of every step cost more than a tenth of the time.
template <class T>
T* keep(std::vector<T>& buffer, size_t count) {
  if (buffer.size() < count) buffer.resize(count);
  return buffer.data();
}

struct Buffers {
  std::vector<float> sum, top, total;
  std::vector<char> scratch;
};

struct Job {
  int span, kv_head, row0, row1;
  int64_t column0, column1;
  int64_t partial;  // first of its rows in the buffers of partial results
};

void check_rows(const Tensor& query, const Tensor& query_ranges) {
  TORCH_CHECK_VALUE(query.dim() == 3 && query.stride(2) == 1 && query.stride(1) == query.size(2),
                    "query must be [rows, heads, size] with contiguous heads");
  TORCH_CHECK_VALUE(query.size(2) % 16 == 0, "head size ", query.size(2), ": expected a multiple of 16");
  TORCH_CHECK_VALUE(query_ranges.scalar_type() == at::kLong && query_ranges.dim() == 2 && query_ranges.is_contiguous(),
                    "query_ranges must be int64 [requests, ...], contiguous");
}

Span span_of(const Tensor& query, int64_t first, int64_t last, int64_t kv_heads, double scale, double soft_cap) {
  TORCH_CHECK_VALUE(0 <= first && first < last && last <= query.size(0), "rows [", first, ", ", last, ") of ",
                    query.size(0));
  TORCH_CHECK_VALUE(kv_heads > 0 && query.size(1) % kv_heads == 0, query.size(1), " heads over ", kv_heads,
                    " kv heads");
  Span s{};
  s.dtype = dtype_of(query, "query");
  s.query = static_cast<const char*>(query.data_ptr()) + first * query.stride(0) * query.element_size();
  s.query_stride = query.stride(0);
  s.rows = int(last - first);
  s.heads = int(query.size(1));
  s.kv_heads = int(kv_heads);
  s.size = int(query.size(2));
  s.scale = float(scale);
  TORCH_CHECK_VALUE(soft_cap >= 0, "soft_cap ", soft_cap, ": expected 0 (none) or more");
  s.soft_cap = float(soft_cap);
  s.gemm = gemm_for(s.dtype);
  return s;
}

void check_hidden(const Tensor& hidden_kv_lens, int64_t rows) {
  TORCH_CHECK_VALUE(hidden_kv_lens.scalar_type() == at::kLong && hidden_kv_lens.is_contiguous() &&
                        hidden_kv_lens.numel() == rows,
                    "hidden_kv_lens must be int64 [", rows, "]");
}

// Runs all spans. out (may be undefined) [rows, heads, size] and lse [rows, heads], float, rows of all spans in order.
void run(const std::vector<Span>& spans, const Tensor& out, const Tensor& lse) {
  std::vector<Job> jobs;
  int64_t partial_rows = 0, most_rows = 0;
  std::vector<int64_t> splits(spans.size()), first_job(spans.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span& s = spans[i];
    const int64_t group = s.heads / s.kv_heads;
    const int64_t columns = *std::max_element(s.visible_kv_lens, s.visible_kv_lens + s.rows);
    const int64_t rows = std::max<int64_t>(1, PART_ROWS / group);
    // Many rows: one part for all columns, so that partial results stay small.
    const int64_t width = s.rows > 2 * rows            ? std::max<int64_t>(columns, 1)
                          : s.rows * group <= FEW_ROWS ? PART_COLUMNS_OF_FEW
                                                       : PART_COLUMNS;
    splits[i] = std::max<int64_t>(1, (columns + width - 1) / width);
    first_job[i] = int64_t(jobs.size());
    // Per split and kv head, the parts of rows follow each other: see `merge` below.
    for (int64_t split = 0; split < splits[i]; ++split)
      for (int h = 0; h < s.kv_heads; ++h)
        for (int64_t r = 0; r < s.rows; r += rows) {
          const int64_t stop = std::min<int64_t>(s.rows, r + rows);
          jobs.push_back({int(i), h, int(r), int(stop), split * width, std::min(columns, (split + 1) * width),
                          partial_rows});
          partial_rows += (stop - r) * group;
          most_rows = std::max(most_rows, stop - r);
        }
  }
  if (jobs.empty()) return;
  const SpanKernels& kernel = kernels().span;
  size_t scratch = 0;
  for (const Span& s : spans) scratch = std::max(scratch, kernel.scratch(s, int(std::min<int64_t>(s.rows, most_rows))));
  const int64_t size = spans[0].size;
  const bool want = out.defined();
  static thread_local Buffers kept;
  float* sums = want ? keep(kept.sum, partial_rows * size) : nullptr;
  float *tops = keep(kept.top, partial_rows), *totals = keep(kept.total, partial_rows);
  const int threads = int(std::min<int64_t>(at::get_num_threads(), int64_t(jobs.size())));
  char* buffer = keep(kept.scratch, threads * scratch + 64);
  buffer += (64 - reinterpret_cast<uintptr_t>(buffer) % 64) % 64;

  // A thread takes all kv heads of a split, where there are enough: they read neighbouring memory, and the same rotations.
  const int chunk = jobs.size() >= size_t(2 * threads * spans[0].kv_heads) ? spans[0].kv_heads : 1;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, chunk)
    for (int64_t j = 0; j < int64_t(jobs.size()); ++j) {
      const Job& job = jobs[j];
      const SpanPart part{job.kv_head,
                          job.row0,
                          job.row1,
                          job.column0,
                          job.column1,
                          want ? sums + job.partial * size : nullptr,
                          tops + job.partial,
                          totals + job.partial};
      kernel.part(spans[job.span], part, buffer + omp_get_thread_num() * scratch);
    }
    if (spans[0].gemm) at::native::cpublas::brgemm_release();
  }

  // Merge the splits: the part of a row in split k lies (jobs per split) further on than that in split k - 1.
  std::vector<std::pair<int, int>> rows;
  for (size_t i = 0; i < spans.size(); ++i)
    for (int r = 0; r < spans[i].rows; ++r) rows.emplace_back(int(i), r);
  float* outs = want ? out.data_ptr<float>() : nullptr;
  float* lses = lse.data_ptr<float>();
  at::parallel_for(0, int64_t(rows.size()), 64, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const auto [i, r] = rows[n];
      const Span& s = spans[i];
      const int64_t group = s.heads / s.kv_heads, per = std::max<int64_t>(1, PART_ROWS / group);
      const int64_t row_parts = (s.rows + per - 1) / per, stride = row_parts * s.kv_heads;
      for (int h = 0; h < s.heads; ++h) {
        const int64_t job = first_job[i] + (h / group) * row_parts + r / per, inside = (r % per) * group + h % group;
        float highest = -std::numeric_limits<float>::infinity(), all = 0;
        for (int64_t k = 0; k < splits[i]; ++k)
          highest = std::max(highest, tops[jobs[job + k * stride].partial + inside]);
        float* to = want ? outs + (n * s.heads + h) * size : nullptr;
        if (to) std::fill(to, to + size, 0.0f);
        if (highest == -std::numeric_limits<float>::infinity()) {
          lses[n * s.heads + h] = highest;
          continue;
        }
        for (int64_t k = 0; k < splits[i]; ++k) {
          const int64_t at = jobs[job + k * stride].partial + inside;
          const float weight = std::exp(tops[at] - highest);
          all += totals[at] * weight;
          if (to && weight > 0)
            for (int64_t d = 0; d < size; ++d) to[d] += weight * sums[at * size + d];
        }
        if (to)
          for (int64_t d = 0; d < size; ++d) to[d] /= all;
        lses[n * s.heads + h] = highest + std::log(all);
      }
    }
  });
}

// See vllm_hypic/backends/ops/span_attention/__init__.py for what these compute.

std::tuple<Tensor, Tensor> span_attention(const Tensor& query, const Tensor& pool_key, const Tensor& pool_value,
                                          at::TensorList slot_mapping, at::TensorList kv_positions,
                                          const std::optional<Tensor>& table, bool neox, const Tensor& visible_kv_lens,
                                          const Tensor& query_ranges, double scale,
                                          const std::optional<Tensor>& hidden_kv_lens, double soft_cap) {
  check_rows(query, query_ranges);
  if (hidden_kv_lens) check_hidden(*hidden_kv_lens, visible_kv_lens.numel());
  const int64_t requests = query_ranges.size(0), kv_heads = pool_key.size(1), size = query.size(2);
  TORCH_CHECK_VALUE(query_ranges.size(1) == 2, "query_ranges must be [requests, 2]");
  TORCH_CHECK_VALUE(int64_t(slot_mapping.size()) == requests && int64_t(kv_positions.size()) == requests,
                    "one tensor of slots and one of positions per request");
  for (const Tensor* t : {&pool_key, &pool_value}) {
    TORCH_CHECK_VALUE(t->dim() == 3 && t->size(1) == kv_heads && t->size(2) == size && t->stride(2) == 1 &&
                          t->stride(1) == size && t->size(0) == pool_key.size(0),
                      "pool tensors must be [slots, kv heads, ", size, "] with contiguous heads");
    TORCH_CHECK_TYPE(t->scalar_type() == query.scalar_type(), "pool and query must have one dtype");
  }
  TORCH_CHECK_VALUE(visible_kv_lens.scalar_type() == at::kLong && visible_kv_lens.is_contiguous(), "visible_kv_lens must be int64");
  PoolColumns pool{};
  pool.key = pool_key.data_ptr();
  pool.value = pool_value.data_ptr();
  pool.key_stride = pool_key.stride(0);
  pool.value_stride = pool_value.stride(0);
  pool.neox = neox;
  if (table) {
    TORCH_CHECK_VALUE(table->dim() == 2 && table->stride(1) == 1 && table->size(1) % 2 == 0 && table->size(1) <= size,
                      "table must be [positions, rotary dim <= ", size, "]");
    pool.table = table->data_ptr();
    pool.table_dtype = dtype_of(*table, "table");
    pool.table_stride = table->stride(0);
    pool.rotary = int(table->size(1));
  }
  const int64_t* row_bounds = query_ranges.data_ptr<int64_t>();
  std::vector<Span> spans;
  int64_t rows = 0;
  for (int64_t i = 0; i < requests; ++i) {
    Span s = span_of(query, row_bounds[2 * i], row_bounds[2 * i + 1], kv_heads, scale, soft_cap);
    s.pool = pool;
    for (const Tensor* t : {&slot_mapping[i], &kv_positions[i]})
      TORCH_CHECK_VALUE(t->scalar_type() == at::kLong && t->is_contiguous() && t->numel() == slot_mapping[i].numel(),
                        "column slots and positions must be int64 and of one length");
    s.pool.slots = slot_mapping[i].data_ptr<int64_t>();
    s.pool.positions = kv_positions[i].data_ptr<int64_t>();
    TORCH_CHECK_VALUE(rows + s.rows <= visible_kv_lens.numel(), "visible_kv_lens has ", visible_kv_lens.numel(), " rows");
    s.visible_kv_lens = visible_kv_lens.data_ptr<int64_t>() + rows;
    if (hidden_kv_lens) s.hidden_kv_lens = hidden_kv_lens->data_ptr<int64_t>() + rows;
    const auto [least, most] = std::minmax_element(s.visible_kv_lens, s.visible_kv_lens + s.rows);
    TORCH_CHECK_VALUE(*least >= 0 && *most <= slot_mapping[i].numel(), "a row of request ", i, " sees ", *most, " of ",
                      slot_mapping[i].numel(), " columns");
    for (int64_t c = 0; c < *most; ++c) {
      const int64_t slot = s.pool.slots[c], position = s.pool.positions[c];
      TORCH_CHECK_INDEX(0 <= slot && slot < pool_key.size(0), "column ", c, " in slot ", slot, " of ",
                        pool_key.size(0));
      TORCH_CHECK_INDEX(!table || (0 <= position && position < table->size(0)), "column ", c, " at position ",
                        position, " of ", table ? table->size(0) : 0);
    }
    rows += s.rows;
    spans.push_back(s);
  }
  const auto floats = query.options().dtype(at::kFloat);
  Tensor out = at::empty({rows, query.size(1), size}, floats), lse = at::empty({rows, query.size(1)}, floats);
  run(spans, out, lse);
  return {out, lse};
}

// Spans over vLLM's cache: see `cache_attention`. `seen` has room for what each row sees, and must outlive them.
std::vector<Span> cache_spans(const Tensor& query, const Tensor& kv_cache, const Tensor& key_index,
                              const std::optional<Tensor>& value_index, const Tensor& block_table,
                              const Tensor& query_ranges, double scale, const std::optional<Tensor>& hidden_kv_lens,
                              double soft_cap, bool in_lines, std::vector<int64_t>& seen) {
  check_rows(query, query_ranges);
  TORCH_CHECK_VALUE(query_ranges.size(1) == 4, "query_ranges must be [requests, 4]: first row, last row, batch row, tokens");
  for (const Tensor* index : {&key_index, value_index ? &*value_index : &key_index})
    TORCH_CHECK_VALUE(index->scalar_type() == at::kInt && index->is_contiguous() && index->dim() == 3 &&
                          index->sizes() == key_index.sizes() && index->size(2) == query.size(2),
                      "an index must be int32 [block size, kv heads, ", query.size(2), "]");
  TORCH_CHECK_VALUE(block_table.scalar_type() == at::kInt && block_table.dim() == 2 && block_table.stride(1) == 1,
                    "block_table must be int32 [requests, blocks]");
  TORCH_CHECK_TYPE(kv_cache.scalar_type() == query.scalar_type(), "cache and query must have one dtype");
  CacheColumns cache{};
  cache.cache = kv_cache.data_ptr();
  cache.block_stride = kv_cache.stride(0);
  cache.block_size = int(key_index.size(0));
  cache.key = key_index.data_ptr<int32_t>();
  if (value_index) cache.value = value_index->data_ptr<int32_t>();
  TORCH_CHECK_VALUE(!in_lines || cache.block_size % 16 == 0, "blocks of ", cache.block_size,
                    " tokens: lines need a multiple of 16");
  cache.in_lines = in_lines;
  const int64_t* b = query_ranges.data_ptr<int64_t>();
  int64_t rows = 0;
  for (int64_t i = 0; i < query_ranges.size(0); ++i) rows += b[4 * i + 1] - b[4 * i];
  if (hidden_kv_lens) check_hidden(*hidden_kv_lens, rows);
  seen.resize(rows);
  std::vector<Span> spans;
  rows = 0;
  for (int64_t i = 0; i < query_ranges.size(0); ++i, b += 4) {
    Span s = span_of(query, b[0], b[1], key_index.size(1), scale, soft_cap);
    const int64_t row = b[2], tokens = b[3];
    TORCH_CHECK_VALUE(tokens >= s.rows, s.rows, " rows of ", tokens, " tokens");
    const int64_t blocks = (tokens + cache.block_size - 1) / cache.block_size;
    TORCH_CHECK_INDEX(0 <= row && row < block_table.size(0) && blocks <= block_table.size(1), "batch row ", row,
                      " with ", blocks, " blocks of a table of ", block_table.sizes());
    s.cache = cache;
    s.cache.blocks = block_table.data_ptr<int32_t>() + row * block_table.stride(0);
    for (int64_t k = 0; k < blocks; ++k)
      TORCH_CHECK_INDEX(0 <= s.cache.blocks[k] && s.cache.blocks[k] < kv_cache.size(0), "block ", s.cache.blocks[k],
                        " of ", kv_cache.size(0));
    s.visible_kv_lens = seen.data() + rows;
    if (hidden_kv_lens) s.hidden_kv_lens = hidden_kv_lens->data_ptr<int64_t>() + rows;
    for (int r = 0; r < s.rows; ++r) seen[rows + r] = tokens - s.rows + r + 1;
    rows += s.rows;
    spans.push_back(s);
  }
  return spans;
}

Tensor cache_lse(const Tensor& query, const Tensor& kv_cache, const Tensor& index, const Tensor& block_table,
                 const Tensor& query_ranges, double scale, double soft_cap, bool in_lines) {
  std::vector<int64_t> seen;
  const auto spans = cache_spans(query, kv_cache, index, {}, block_table, query_ranges, scale, {}, soft_cap, in_lines,
                                 seen);
  Tensor lse = at::empty({int64_t(seen.size()), query.size(1)}, query.options().dtype(at::kFloat));
  run(spans, Tensor(), lse);
  return lse;
}

std::tuple<Tensor, Tensor> cache_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& key_index,
                                           const Tensor& value_index, const Tensor& block_table,
                                           const Tensor& query_ranges, double scale, const Tensor& hidden_kv_lens,
                                           double soft_cap, bool in_lines) {
  std::vector<int64_t> seen;
  const auto spans = cache_spans(query, kv_cache, key_index, value_index, block_table, query_ranges, scale,
                                 hidden_kv_lens, soft_cap, in_lines, seen);
  const auto floats = query.options().dtype(at::kFloat);
  const int64_t rows = int64_t(seen.size());
  Tensor out = at::empty({rows, query.size(1), query.size(2)}, floats), lse = at::empty({rows, query.size(1)}, floats);
  run(spans, out, lse);
  return {out, lse};
}

template <class T>
void merge_rows(Tensor& output, const Tensor& output_lse, const Tensor& other, const Tensor& other_lse,
                const Tensor& query_ranges) {
  const int64_t heads = output.size(1), size = output.size(2), stride = output.stride(0);
  T* out = output.data_ptr<T>();
  const float *a = output_lse.data_ptr<float>(), *b = other_lse.data_ptr<float>(), *more = other.data_ptr<float>();
  const int64_t* rows = query_ranges.data_ptr<int64_t>();
  std::vector<int64_t> where;
  for (int64_t i = 0; i < query_ranges.size(0); ++i)
    for (int64_t r = rows[i * query_ranges.size(1)]; r < rows[i * query_ranges.size(1) + 1]; ++r) where.push_back(r);
  TORCH_CHECK_VALUE(int64_t(where.size()) == other.size(0), "query_ranges name ", where.size(), " rows, other has ",
                    other.size(0));
  at::parallel_for(0, int64_t(where.size()) * heads, 512, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const float top = std::max(a[n], b[n]);
      const float x = std::exp(a[n] - top), y = std::exp(b[n] - top), ours = x / (x + y), theirs = y / (x + y);
      T* to = out + where[n / heads] * stride + (n % heads) * size;
      const float* from = more + n * size;
      for (int64_t d = 0; d < size; ++d) to[d] = T(float(to[d]) * ours + from[d] * theirs);
    }
  });
}

void merge_(Tensor output, const Tensor& output_lse, const Tensor& other, const Tensor& other_lse,
            const Tensor& query_ranges) {
  check_rows(output, query_ranges);
  const int64_t heads = output.size(1);
  for (const Tensor* t : {&output_lse, &other_lse})
    TORCH_CHECK_VALUE(t->scalar_type() == at::kFloat && t->is_contiguous() && t->dim() == 2 &&
                          t->size(0) == other.size(0) && t->size(1) == heads,
                      "log-sum-exps must be float32 [rows, ", heads, "]");
  TORCH_CHECK_VALUE(other.scalar_type() == at::kFloat && other.is_contiguous() && other.dim() == 3 &&
                        other.size(1) == heads && other.size(2) == output.size(2),
                    "the other result must be float32 [rows, heads, size]");
  switch (dtype_of(output, "output")) {
    case DType::f32: return merge_rows<float>(output, output_lse, other, other_lse, query_ranges);
    case DType::bf16: return merge_rows<at::BFloat16>(output, output_lse, other, other_lse, query_ranges);
    case DType::f16: return merge_rows<at::Half>(output, output_lse, other, other_lse, query_ranges);
  }
}

TORCH_LIBRARY_FRAGMENT(vllm_hypic, m) {
  m.def(
      "span_attention(Tensor query, Tensor pool_key, Tensor pool_value, Tensor[] slot_mapping, "
      "Tensor[] kv_positions, Tensor? table, bool neox, Tensor visible_kv_lens, Tensor query_ranges, float scale, "
      "Tensor? hidden_kv_lens=None, float soft_cap=0) -> (Tensor, Tensor)");
  m.def(
      "cache_lse(Tensor query, Tensor kv_cache, Tensor index, Tensor block_table, Tensor query_ranges, float scale, "
      "float soft_cap=0, bool in_lines=False) -> Tensor");
  m.def(
      "cache_attention(Tensor query, Tensor kv_cache, Tensor key_index, Tensor value_index, Tensor block_table, "
      "Tensor query_ranges, float scale, Tensor hidden_kv_lens, float soft_cap=0, bool in_lines=False) -> "
      "(Tensor, Tensor)");
  m.def("merge_(Tensor(a!) output, Tensor output_lse, Tensor other, Tensor other_lse, Tensor query_ranges) -> ()");
}

TORCH_LIBRARY_IMPL(vllm_hypic, CPU, m) {
  m.impl("span_attention", span_attention);
  m.impl("cache_lse", cache_lse);
  m.impl("cache_attention", cache_attention);
  m.impl("merge_", merge_);
}

}  // namespace
}  // namespace hypic
