// Launchers of span attention: checks, division into parts, threads, and merging of partial results.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "bindings.h"
#include "dispatch.h"

namespace hypic {
namespace {

using at::Tensor;

// Columns of one part. Fixed, so that a row's result depends neither on threads nor on who else is in the batch. Few
// rows wait for memory: all kv heads of a column, which lie side by side, are of one part.
constexpr int64_t PART_COLUMNS = 4096, PART_COLUMNS_OF_FEW = 256;
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

// oneDNN's batch-reduce GEMM uses AMX or AVX512-BF16, whichever the machine has.
GemmBf16 gemm_for(DType dtype) {
  const bool has = &kernels() == &kernels_avx512_bf16 || &kernels() == &kernels_amx;
  return dtype == DType::bf16 && has ? gemm_bf16 : nullptr;
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
  int span, kv_head, kv_heads, row0, row1;
  int64_t column0, column1;
  int64_t partial;  // first of its rows in the buffers of partial results
};

// The jobs of a span: per split and group of kv heads, its parts of rows follow each other. Columns before `first` are
// hidden from all rows and not read.
struct Division {
  int64_t first_job, splits, rows_of_part, row_parts, heads_of_part, first;
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

void check_lens(const Tensor& lens, int64_t rows, const char* name) {
  TORCH_CHECK_VALUE(lens.scalar_type() == at::kLong && lens.is_contiguous() && lens.numel() == rows, name,
                    " must be int64 [", rows, "], contiguous");
}

// Whether of values [first, last) one lies outside of [0, limit).
bool leaves(const int64_t* values, int64_t first, int64_t last, int64_t limit) {
  int64_t outside = 0;
  for (int64_t c = first; c < last; ++c) outside |= values[c] | (limit - 1 - values[c]);
  return outside < 0;
}

// Raises for columns [first, last) of the pool that `leaves` has found something in.
void refuse(const PoolColumns& pool, int64_t first, int64_t last) {
  for (int64_t c = first; c < last; ++c) {
    TORCH_CHECK_INDEX(0 <= pool.slots[c] && pool.slots[c] < pool.slot_count, "column ", c, " in slot ", pool.slots[c],
                      " of ", pool.slot_count);
    TORCH_CHECK_INDEX(!pool.table || (0 <= pool.positions[c] && pool.positions[c] < pool.position_count), "column ", c,
                      " at position ", pool.positions[c], " of ", pool.position_count);
  }
}

// Partial results of spans: of every part its largest scores, the sums of its weights and, where wanted, of weighted V.
// They lie in buffers of this thread, until the next call.
class Partials {
 public:
  explicit Partials(const std::vector<Span>& spans) : spans_(spans), size_(spans.empty() ? 0 : spans[0].size) {
    int64_t rows = 0, most_rows = 0;
    for (size_t i = 0; i < spans.size(); ++i) divide(int(i), rows, most_rows);
    if (!jobs_.empty()) compute(rows, most_rows);
  }

  // Calls found(top, total, sum [size]) for each part of a query head of a row of a span.
  template <class F>
  void each(int span, int row, int head, const F& found) const {
    const Span& s = spans_[span];
    const Division& by = divisions_[span];
    const int64_t group = s.heads / s.kv_heads;
    const int64_t kv_head = head / group, inside = (row % by.rows_of_part) * group + head % group;
    const Job* job = jobs_.data() + by.first_job + kv_head / by.heads_of_part * by.row_parts + row / by.rows_of_part;
    for (int64_t k = 0; k < by.splits; ++k, job += by.row_parts * (s.kv_heads / by.heads_of_part)) {
      const int64_t at = job->partial + kv_head % by.heads_of_part * (job->row1 - job->row0) * group + inside;
      found(tops_[at], totals_[at], sums_ + at * size_);
    }
  }

 private:
  void divide(int span, int64_t& partial_rows, int64_t& most_rows) {
    const Span& s = spans_[span];
    const int64_t group = s.heads / s.kv_heads;
    const int64_t columns = *std::max_element(s.visible_kv_lens, s.visible_kv_lens + s.rows);
    const int64_t hidden = s.hidden_kv_lens ? *std::min_element(s.hidden_kv_lens, s.hidden_kv_lens + s.rows) : 0;
    const int64_t rows = std::max<int64_t>(1, PART_ROWS / group);
    const bool few = s.rows * group <= FEW_ROWS;
    // Many rows: one part for all columns, so that partial results stay small.
    const int64_t width = s.rows > 2 * rows ? std::max<int64_t>(columns, 1) : few ? PART_COLUMNS_OF_FEW : PART_COLUMNS;
    const int heads = few && s.rows * s.heads <= ROW_BLOCK ? s.kv_heads : 1;
    Division by{int64_t(jobs_.size()), 0, rows, (s.rows + rows - 1) / rows, heads, first_read(hidden)};
    for (int64_t first = hidden / width * width; first < columns; first += width, ++by.splits)
      for (int h = 0; h < s.kv_heads; h += heads)
        for (int64_t r = 0; r < s.rows; r += rows) {
          const int64_t stop = std::min<int64_t>(s.rows, r + rows);
          jobs_.push_back({span, h, heads, int(r), int(stop), first, std::min(columns, first + width), partial_rows});
          partial_rows += heads * (stop - r) * group;
          most_rows = std::max(most_rows, stop - r);
        }
    divisions_.push_back(by);
  }

  void compute(int64_t partial_rows, int64_t most_rows) {
    const SpanKernels& kernel = kernels().span;
    size_t scratch = 0;
    for (const Span& s : spans_)
      scratch = std::max(scratch, kernel.scratch(s, int(std::min<int64_t>(s.rows, most_rows))));
    static thread_local Buffers kept;
    sums_ = keep(kept.sum, partial_rows * size_);
    tops_ = keep(kept.top, partial_rows);
    totals_ = keep(kept.total, partial_rows);
    const int threads = int(std::min<int64_t>(at::get_num_threads(), int64_t(jobs_.size())));
    char* buffer = keep(kept.scratch, threads * scratch + 64);
    buffer += (64 - reinterpret_cast<uintptr_t>(buffer) % 64) % 64;
    // A thread takes all kv heads of a split, where there are enough: they read neighbouring memory, and the same
    // rotations.
    const int apart = spans_[0].kv_heads / jobs_[0].kv_heads, chunk = jobs_.size() >= size_t(2 * threads * apart) ? apart : 1;
    // The part with a column that is not in the pool, if any; each is checked by the thread that will read it.
    std::atomic<const Job*> refused = nullptr;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, chunk)
      for (int64_t j = 0; j < int64_t(jobs_.size()); ++j) {
        const Job& job = jobs_[j];
        const Span& s = spans_[job.span];
        const int64_t first = first_read_of(job);
        if (s.pool.key && (leaves(s.pool.slots, first, job.column1, s.pool.slot_count) ||
                           (s.pool.table && leaves(s.pool.positions, first, job.column1, s.pool.position_count)))) {
          refused = &job;
          continue;
        }
        const SpanPart part{job.kv_head,
                            job.kv_heads,
                            job.row0,
                            job.row1,
                            job.column0,
                            job.column1,
                            s.weighs ? sums_ + job.partial * size_ : nullptr,
                            tops_ + job.partial,
                            totals_ + job.partial};
        kernel.part(s, part, buffer + omp_get_thread_num() * scratch);
      }
      if (spans_[0].gemm) at::native::cpublas::brgemm_release();
    }
    if (const Job* job = refused) refuse(spans_[job->span].pool, first_read_of(*job), job->column1);
  }

  int64_t first_read_of(const Job& job) const { return std::max(job.column0, divisions_[job.span].first); }

  const std::vector<Span>& spans_;
  const int64_t size_;
  std::vector<Job> jobs_;
  std::vector<Division> divisions_;
  float *sums_ = nullptr, *tops_ = nullptr, *totals_ = nullptr;
};

// Calls body(span, row of the span, row of all) for the rows of spans [0, n).
template <class F>
void each_row(const std::vector<Span>& spans, size_t n, const F& body) {
  std::vector<std::pair<int, int>> rows;
  for (size_t i = 0; i < n; ++i)
    for (int r = 0; r < spans[i].rows; ++r) rows.emplace_back(int(i), r);
  at::parallel_for(0, int64_t(rows.size()), 64, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) body(rows[k].first, rows[k].second, k);
  });
}

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// See vllm_hypic/backends/ops/span_attention/__init__.py for what these compute.

// A span over the pool for each request.
std::vector<Span> pool_spans(const Tensor& query, const Tensor& pool_key, const Tensor& pool_value,
                             const Tensors& slot_mapping, const Tensors& kv_positions,
                             const std::optional<Tensor>& table, bool neox, const Tensor& visible_kv_lens,
                             const Tensor& query_ranges, double scale, const std::optional<Tensor>& hidden_kv_lens,
                             double soft_cap, double key_scale, double value_scale) {
  check_rows(query, query_ranges);
  const int64_t requests = query_ranges.size(0), kv_heads = pool_key.size(1), size = query.size(2);
  TORCH_CHECK_VALUE(int64_t(slot_mapping.size()) == requests && int64_t(kv_positions.size()) == requests,
                    "one tensor of slots and one of positions per request");
  std::vector<Span> spans;
  for (const Tensor* t : {&pool_key, &pool_value}) {
    TORCH_CHECK_VALUE(t->dim() == 3 && t->size(1) == kv_heads && t->size(2) == size && t->stride(2) == 1 &&
                          t->stride(1) == size && t->size(0) == pool_key.size(0),
                      "pool tensors must be [slots, kv heads, ", size, "] with contiguous heads");
    TORCH_CHECK_TYPE(t->scalar_type() == pool_key.scalar_type() &&
                         (t->scalar_type() == query.scalar_type() || t->scalar_type() == at::kFloat8_e4m3fn),
                     "pool and query must have one dtype, or the pool float8_e4m3fn");
  }
  PoolColumns pool{};
  pool.fp8 = pool_key.scalar_type() == at::kFloat8_e4m3fn;
  pool.key_scale = float(key_scale);
  pool.value_scale = float(value_scale);
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
  const int64_t *bounds = query_ranges.data_ptr<int64_t>(), per_request = query_ranges.size(1);
  int64_t rows = 0;
  for (int64_t i = 0; i < requests; ++i, bounds += per_request) {
    spans.push_back(span_of(query, bounds[0], bounds[1], kv_heads, scale, soft_cap));
    rows += spans.back().rows;
  }
  check_lens(visible_kv_lens, rows, "visible_kv_lens");
  if (hidden_kv_lens) check_lens(*hidden_kv_lens, rows, "hidden_kv_lens");
  rows = 0;
  for (int64_t i = 0; i < requests; ++i) {
    Span& s = spans[i];
    s.weighs = true;
    s.pool = pool;
    for (const Tensor* t : {&slot_mapping[i], &kv_positions[i]})
      TORCH_CHECK_VALUE(t->scalar_type() == at::kLong && t->is_contiguous() && t->numel() == slot_mapping[i].numel(),
                        "column slots and positions must be int64 and of one length");
    s.pool.slots = slot_mapping[i].data_ptr<int64_t>();
    s.pool.positions = kv_positions[i].data_ptr<int64_t>();
    s.visible_kv_lens = visible_kv_lens.data_ptr<int64_t>() + rows;
    if (hidden_kv_lens) {
      s.hidden_kv_lens = hidden_kv_lens->data_ptr<int64_t>() + rows;
      const int64_t hidden = *std::min_element(s.hidden_kv_lens, s.hidden_kv_lens + s.rows);
      TORCH_CHECK_VALUE(hidden >= 0, "a row of request ", i, " hides ", hidden, " columns");
    }
    const auto [least, most] = std::minmax_element(s.visible_kv_lens, s.visible_kv_lens + s.rows);
    TORCH_CHECK_VALUE(*least >= 0 && *most <= slot_mapping[i].numel(), "a row of request ", i, " sees ", *most, " of ",
                      slot_mapping[i].numel(), " columns");
    s.pool.slot_count = pool_key.size(0);
    if (table) s.pool.position_count = table->size(0);
    rows += s.rows;
  }
  return spans;
}

std::tuple<Tensor, Tensor> span_attention(const Tensor& query, const Tensor& pool_key, const Tensor& pool_value,
                                          const Tensors& slot_mapping, const Tensors& kv_positions,
                                          const std::optional<Tensor>& table, bool neox, const Tensor& visible_kv_lens,
                                          const Tensor& query_ranges, double scale,
                                          const std::optional<Tensor>& hidden_kv_lens, double soft_cap,
                                          double key_scale, double value_scale) {
  TORCH_CHECK_VALUE(query_ranges.dim() == 2 && query_ranges.size(1) == 2, "query_ranges must be [requests, 2]");
  const auto spans = pool_spans(query, pool_key, pool_value, slot_mapping, kv_positions, table, neox, visible_kv_lens,
                                query_ranges, scale, hidden_kv_lens, soft_cap, key_scale, value_scale);
  const auto floats = query.options().dtype(at::kFloat);
  const int64_t rows = visible_kv_lens.numel(), heads = query.size(1), size = query.size(2);
  Tensor out = at::empty({rows, heads, size}, floats), lse = at::empty({rows, heads}, floats);
  const Partials parts(spans);
  float *outs = out.data_ptr<float>(), *lses = lse.data_ptr<float>();
  each_row(spans, spans.size(), [&](int span, int row, int64_t n) {
    for (int64_t h = 0; h < heads; ++h) {
      float highest = NOTHING, all = 0;
      parts.each(span, row, h, [&](float top, float, const float*) { highest = std::max(highest, top); });
      float* to = outs + (n * heads + h) * size;
      std::fill(to, to + size, 0.0f);
      lses[n * heads + h] = highest;
      if (highest == NOTHING) continue;
      parts.each(span, row, h, [&](float top, float total, const float* sum) {
        const float weight = std::exp(top - highest);
        if (weight == 0) return;
        all += total * weight;
        for (int64_t d = 0; d < size; ++d) to[d] += weight * sum[d];
      });
      for (int64_t d = 0; d < size; ++d) to[d] /= all;
      lses[n * heads + h] = highest + std::log(all);
    }
  });
  return {out, lse};
}

// Where groups of `tokens` tokens and `dims` dimensions lie, as an index says of the first of them.
Affine affine(const Tensor& index, int64_t tokens, int64_t dims) {
  const int32_t* at = index.data_ptr<int32_t>();
  const int64_t heads = index.size(1), size = index.size(2);
  const auto step = [&](bool there, int64_t next) { return there ? at[next] - at[0] : 0; };
  return {at[0], step(index.size(0) > tokens, tokens * heads * size), step(heads > 1, size), step(size > dims, dims)};
}

// Adds a span over vLLM's cache for each request. `seen` gets room for what each row sees, and must outlive them.
void add_cache_spans(std::vector<Span>& spans, const Tensor& query, const Tensor& kv_cache, const Tensor& key_index,
                     const std::optional<Tensor>& value_index, const Tensor& block_table, const Tensor& query_ranges,
                     double scale, const std::optional<Tensor>& hidden_kv_lens, double soft_cap, int64_t layout,
                     std::vector<int64_t>& seen) {
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
  TORCH_CHECK_VALUE(0 <= layout && layout <= 2, "layout ", layout, ": expected 0, 1 or 2");
  TORCH_CHECK_VALUE(layout == 0 || cache.block_size % 16 == 0, "blocks of ", cache.block_size,
                    " tokens: lines need a multiple of 16");
  cache.layout = Layout(layout);
  const int64_t together = cache.layout == Layout::pairs ? 2 : 1;
  cache.key_at = affine(key_index, 16, together);
  if (value_index) cache.value_at = affine(*value_index, together, 16);
  const int64_t* b = query_ranges.data_ptr<int64_t>();
  int64_t rows = 0;
  for (int64_t i = 0; i < query_ranges.size(0); ++i) rows += b[4 * i + 1] - b[4 * i];
  if (hidden_kv_lens) check_lens(*hidden_kv_lens, rows, "hidden_kv_lens");
  seen.resize(rows);
  rows = 0;
  for (int64_t i = 0; i < query_ranges.size(0); ++i, b += 4) {
    Span s = span_of(query, b[0], b[1], key_index.size(1), scale, soft_cap);
    s.weighs = value_index.has_value();
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
    for (int r = 0; r < s.rows; ++r) {
      seen[rows + r] = tokens - s.rows + r + 1;
      // Else nothing need be left to divide by.
      TORCH_CHECK_VALUE(!s.hidden_kv_lens || (0 <= s.hidden_kv_lens[r] && s.hidden_kv_lens[r] < seen[rows + r]), "row ",
                        r, " of request ", i, " hides ", s.hidden_kv_lens[r], " of ", seen[rows + r], " tokens");
    }
    rows += s.rows;
    spans.push_back(s);
  }
}

// Rows of spans [0, n) over the pool joined with those of spans [n, 2n) over the cache.
template <class T>
void join_rows(Tensor& output, const Tensor& query_ranges, const std::vector<Span>& spans, const float* sinks) {
  const int64_t heads = output.size(1), size = output.size(2), stride = output.stride(0), n = query_ranges.size(0);
  const int64_t* ranges = query_ranges.data_ptr<int64_t>();
  T* outputs = output.data_ptr<T>();
  const Partials parts(spans);
  each_row(spans, n, [&](int span, int row, int64_t) {
    const bool given = !spans[n + span].weighs;
    std::vector<float> sums(size);
    for (int64_t h = 0; h < heads; ++h) {
      float highest = sinks ? sinks[h] : NOTHING;
      for (int64_t side : {int64_t(span), n + span})
        parts.each(side, row, h, [&](float top, float, const float*) { highest = std::max(highest, top); });
      std::fill(sums.begin(), sums.end(), 0.0f);
      // What stands in `output` counts as much as all that it was made of.
      float all = 0, stands = sinks ? std::exp(sinks[h] - highest) : 0;
      const auto weigh = [&](float top, float total, const float* sum) {
        const float weight = std::exp(top - highest);
        if (weight == 0) return;
        all += total * weight;
        for (int64_t d = 0; d < size; ++d) sums[d] += weight * sum[d];
      };
      parts.each(span, row, h, weigh);
      if (given)
        parts.each(n + span, row, h,
                   [&](float top, float total, const float*) { stands += total * std::exp(top - highest); });
      else
        parts.each(n + span, row, h, weigh);
      T* to = outputs + (ranges[4 * span] + row) * stride + h * size;
      const float before = given ? stands / (all + stands) : 0, by = 1 / (all + stands);
      for (int64_t d = 0; d < size; ++d) to[d] = T(sums[d] * by + (given ? float(to[d]) * before : 0));
    }
  });
}

void join_(Tensor output, const Tensor& query, const Tensor& query_ranges, const Tensor& pool_key,
           const Tensor& pool_value, const Tensors& slot_mapping, const Tensors& kv_positions,
           const std::optional<Tensor>& table, bool neox, const Tensor& visible_kv_lens,
           const std::optional<Tensor>& hidden_columns, double key_scale, double value_scale,
           const Tensor& kv_cache, const Tensor& key_index,
           const std::optional<Tensor>& value_index, const Tensor& block_table,
           const std::optional<Tensor>& hidden_tokens, int64_t layout, double scale,
           const std::optional<Tensor>& sinks, double soft_cap) {
  check_rows(output, query_ranges);
  TORCH_CHECK_VALUE(query_ranges.size(1) == 4,
                    "query_ranges must be [requests, 4]: first row, last row, batch row, tokens");
  TORCH_CHECK_VALUE(output.sizes() == query.sizes() && output.scalar_type() == query.scalar_type(),
                    "output must be of the query's shape and dtype");
  TORCH_CHECK_VALUE(key_index.dim() == 3 && key_index.size(1) == pool_key.size(1), "pool and cache must have as many kv heads");
  if (sinks)
    TORCH_CHECK_VALUE(sinks->scalar_type() == at::kFloat && sinks->is_contiguous() && sinks->numel() == query.size(1),
                      "sinks must be float32 [", query.size(1), "]");
  std::vector<int64_t> seen;
  auto spans = pool_spans(query, pool_key, pool_value, slot_mapping, kv_positions, table, neox, visible_kv_lens,
                          query_ranges, scale, hidden_columns, soft_cap, key_scale, value_scale);
  add_cache_spans(spans, query, kv_cache, key_index, value_index, block_table, query_ranges, scale, hidden_tokens,
                  soft_cap, layout, seen);
  const float* sink = sinks ? sinks->data_ptr<float>() : nullptr;
  switch (dtype_of(output, "output")) {
    case DType::f32: return join_rows<float>(output, query_ranges, spans, sink);
    case DType::bf16: return join_rows<at::BFloat16>(output, query_ranges, spans, sink);
    case DType::f16: return join_rows<at::Half>(output, query_ranges, spans, sink);
  }
}

}  // namespace

void bind_span_attention(pybind11::module_& module) {
  bind(module, "span_attention", span_attention);
  bind(module, "join_", join_);
}

}  // namespace hypic
