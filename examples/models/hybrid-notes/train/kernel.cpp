// The parts of a training step that PyTorch is slow at on a CPU: Gated DeltaNet's convolution, delta rule and
// gated norm in one operation, RMSNorm, and SwiGLU. Each takes and gives bf16 and computes in float32, on one
// thread.
//
// Notation of the delta rule, per head, with S [D, D] (keys x values):
//   u = v - a (k S)    delta = beta u    S' = a S + k^T delta    o = q S'
// where a is the decay, times `keep`, which is 0 at a token before which the state is forgotten.

#include <torch/extension.h>

#include <cmath>
#include <cstring>
#include <vector>

using at::Tensor;
using bf16 = at::BFloat16;

constexpr int D = 32;  // of a head, keys and values alike: Config.linear_dim of model.py
constexpr int TAPS = 4;
constexpr float EPS = 1e-6f;
constexpr float GATED_EPS = 4e-6f;  // of the gated norm: see model.py
const float SCALE = 1.f / std::sqrt((float)D);  // of the queries

// ---- Rows of a state ------------------------------------------------------------------------------------

constexpr int LANES = 16;
typedef float Lane __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

struct Row {
  Lane part[D / LANES];

  static Row zero() { return Row{}; }
  static Row load(const float* from) {
    Row row;
    std::memcpy(&row, from, sizeof row);
    return row;
  }
  void store(float* to) const { std::memcpy(to, this, sizeof *this); }
  void add(float factor, const Row& other) {
    for (int j = 0; j < D / LANES; j++) part[j] += factor * other.part[j];
  }
  void add_product(const Row& x, const Row& y) {
    for (int j = 0; j < D / LANES; j++) part[j] += x.part[j] * y.part[j];
  }
  Row times(float factor) const {
    Row row;
    for (int j = 0; j < D / LANES; j++) row.part[j] = factor * part[j];
    return row;
  }
  float sum() const {
    Lane all = part[0];
    for (int j = 1; j < D / LANES; j++) all += part[j];
    float total = 0;
    for (int i = 0; i < LANES; i++) total += all[i];
    return total;
  }
};

static inline float dot(const float* x, const float* y) {
  Row sum = Row::zero();
  sum.add_product(Row::load(x), Row::load(y));
  return sum.sum();
}

// ---- Scalars and bf16 -----------------------------------------------------------------------------------

// exp() as a polynomial that the compiler vectorises; relative error below 1e-6.
static inline float fast_exp(float x) {
  x = x > 80.f ? 80.f : (x < -80.f ? -80.f : x);
  float scaled = x * 1.44269504f, whole = __builtin_floorf(scaled + 0.5f), f = (scaled - whole) * 0.69314718f;
  float p = 1.f + f * (1.f + f * (0.5f + f * (0.16666667f +
                                              f * (0.041666668f + f * (0.0083333338f + f * 0.0013888889f)))));
  return p * __builtin_bit_cast(float, ((int)whole + 127) << 23);
}

static inline float sigmoid(float x) { return 1.f / (1.f + fast_exp(-x)); }
static inline float silu(float x) { return x * sigmoid(x); }
static inline float silu_slope(float x) {
  float s = sigmoid(x);
  return s * (1.f + x * (1.f - s));
}

static inline void read_bf16(const bf16* from, float* to, int count) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
#pragma GCC ivdep
  for (int i = 0; i < count; i++) to[i] = __builtin_bit_cast(float, (uint32_t)bits[i] << 16);
}

// To nearest, ties to even; no NaN here.
static inline void write_bf16(const float* from, bf16* to, int count) {
  uint16_t* out = reinterpret_cast<uint16_t*>(to);
#pragma GCC ivdep
  for (int i = 0; i < count; i++) {
    uint32_t bits = __builtin_bit_cast(uint32_t, from[i]);
    out[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

// ---- One token of the delta rule ------------------------------------------------------------------------

struct Token {
  float q[D], k[D], v[D];  // normalised; q is scaled, too
  float u[D], delta[D], o[D];
  float q_norm, k_norm;  // factors that normalised q and k
  float decay, beta, keep;
  float rate;    // softplus(a + dt_bias): decay = exp(-exp(A_log) rate) keep
  float before;  // a + dt_bias
};

static inline void forward_step(const float* state, float* next, Token& t) {
  Row read = Row::zero(), out = Row::zero();
  for (int i = 0; i < D; i++) read.add(t.k[i], Row::load(state + i * D));
  Row u = Row::load(t.v);
  u.add(-t.decay, read);
  u.store(t.u);
  Row delta = u.times(t.beta);
  delta.store(t.delta);
  for (int i = 0; i < D; i++) {
    Row row = Row::load(state + i * D).times(t.decay);
    row.add(t.k[i], delta);
    row.store(next + i * D);
    out.add(t.q[i], row);
  }
  out.store(t.o);
}

struct TokenGrad {
  float q[D], k[D], v[D];
  float beta, log_decay;
};

// `grad` is the gradient of the state after the token and becomes that of the state before it.
static inline TokenGrad backward_step(
    float* grad, const float* before, const float* after, const Token& t, const float* d_out) {
  TokenGrad d;
  Row d_o = Row::load(d_out), d_delta = Row::zero(), delta = Row::load(t.delta);
  for (int i = 0; i < D; i++) {
    Row g = Row::load(grad + i * D), product = Row::zero();
    g.add(t.q[i], d_o);
    g.store(grad + i * D);
    d_delta.add(t.k[i], g);
    product.add_product(Row::load(after + i * D), d_o);
    d.q[i] = product.sum();
  }
  Row d_u = d_delta.times(t.beta), by_beta = Row::zero(), by_decay = Row::zero();
  by_beta.add_product(d_delta, Row::load(t.u));
  d.beta = by_beta.sum();
  d_u.store(d.v);
  Row d_read = d_u.times(-t.decay);
  for (int i = 0; i < D; i++) {
    Row g = Row::load(grad + i * D), s = Row::load(before + i * D), product = Row::zero();
    product.add_product(g, delta);
    product.add_product(s, d_read);
    d.k[i] = product.sum();
    g.add(-t.k[i], d_u);
    by_decay.add_product(g, s);
    g.times(t.decay).store(grad + i * D);
  }
  d.log_decay = by_decay.sum() * t.decay;
  return d;
}

// ---- The whole operation --------------------------------------------------------------------------------

struct Weights {
  int heads;
  const float *taps /* [TAPS, 3 H D] */, *a_log, *dt_bias, *norm;
  int width() const { return heads * D; }
  int channels() const { return 3 * width(); }
  // A row of the projections: q, k, v, gate (width each), b, a (heads each).
  int columns() const { return 4 * width() + 2 * heads; }
};

// `rows` are TAPS consecutive rows of channels; `sum` is before the activation.
static void convolve(const Weights& w, const float* rows, float* __restrict sum, float* __restrict active) {
  int n = w.channels();
#pragma GCC ivdep
  for (int c = 0; c < n; c++) {
    float s = 0;
    for (int tap = 0; tap < TAPS; tap++) s += w.taps[tap * n + c] * rows[tap * n + c];
    sum[c] = s;
    active[c] = silu(s);
  }
}

static void prepare(const Weights& w, const float* active, const bf16* row, float keep, int head, Token& t) {
  const float *q = active + head * D, *k = q + w.width(), *v = k + w.width();
  t.q_norm = 1.f / std::sqrt(dot(q, q) + EPS);
  t.k_norm = 1.f / std::sqrt(dot(k, k) + EPS);
  for (int i = 0; i < D; i++) {
    t.q[i] = q[i] * t.q_norm * SCALE;
    t.k[i] = k[i] * t.k_norm;
    t.v[i] = v[i];
  }
  const bf16* scalars = row + 4 * w.width();
  t.beta = sigmoid((float)scalars[head]);
  t.before = (float)scalars[w.heads + head] + w.dt_bias[head];
  t.rate = t.before > 20 ? t.before : std::log1p(std::exp(t.before));
  t.keep = keep;
  t.decay = fast_exp(-fast_exp(w.a_log[head]) * t.rate) * keep;
}

// Returns the output [B, T, H D] and the state at the start of every chunk [B, chunks, H, D, D].
std::vector<Tensor> gdn_forward(Tensor projected, Tensor taps, Tensor a_log, Tensor dt_bias, Tensor norm,
                                Tensor keep, int64_t heads, int64_t chunk) {
  const int batch = projected.size(0), tokens = projected.size(1), chunks = (tokens + chunk - 1) / chunk;
  const Weights w{(int)heads, taps.data_ptr<float>(), a_log.data_ptr<float>(), dt_bias.data_ptr<float>(),
                  norm.data_ptr<float>()};
  const int n = w.channels(), size = heads * D * D;
  Tensor out = at::empty({batch, tokens, w.width()}, projected.options());
  Tensor states = at::empty({batch, chunks, heads, D, D}, keep.options());
  std::vector<float> window(TAPS * n), sum(n), active(n), state(size);
  float gate[D], result[D];
  Token t;
  for (int b = 0; b < batch; b++) {
    std::fill(state.begin(), state.end(), 0.f);
    std::fill(window.begin(), window.end(), 0.f);
    for (int i = 0; i < tokens; i++) {
      const int64_t at = (int64_t)b * tokens + i;
      const bf16* row = projected.data_ptr<bf16>() + at * w.columns();
      std::memmove(window.data(), window.data() + n, (TAPS - 1) * n * sizeof(float));
      read_bf16(row, window.data() + (TAPS - 1) * n, n);
      convolve(w, window.data(), sum.data(), active.data());
      if (i % chunk == 0)
        std::memcpy(states.data_ptr<float>() + ((int64_t)b * chunks + i / chunk) * size, state.data(),
                    size * sizeof(float));
      for (int h = 0; h < heads; h++) {
        prepare(w, active.data(), row, keep.data_ptr<float>()[at], h, t);
        forward_step(state.data() + h * D * D, state.data() + h * D * D, t);
        const float scale = 1.f / std::sqrt(dot(t.o, t.o) / D + GATED_EPS);
        read_bf16(row + n + h * D, gate, D);
        for (int j = 0; j < D; j++) result[j] = w.norm[j] * t.o[j] * scale * silu(gate[j]);
        write_bf16(result, out.data_ptr<bf16>() + at * w.width() + h * D, D);
      }
    }
  }
  return {out, states};
}

// Returns the gradients of projected, taps, a_log, dt_bias and norm.
std::vector<Tensor> gdn_backward(Tensor d_out, Tensor projected, Tensor states, Tensor taps, Tensor a_log,
                                 Tensor dt_bias, Tensor norm, Tensor keep, int64_t heads, int64_t chunk) {
  const int batch = projected.size(0), tokens = projected.size(1), chunks = (tokens + chunk - 1) / chunk;
  const Weights w{(int)heads, taps.data_ptr<float>(), a_log.data_ptr<float>(), dt_bias.data_ptr<float>(),
                  norm.data_ptr<float>()};
  const int n = w.channels(), size = heads * D * D;
  Tensor d_projected = at::empty_like(projected), d_taps = at::zeros_like(taps),
         d_a_log = at::zeros_like(a_log);
  Tensor d_dt_bias = at::zeros_like(dt_bias), d_norm = at::zeros_like(norm);
  std::vector<float> inputs((chunk + TAPS - 1) * n), sum(chunk * n), active(chunk * n), d_active(chunk * n);
  std::vector<float> d_inputs((chunk + TAPS - 1) * n), grad(size), path((chunk + 1) * D * D);
  std::vector<Token> line(chunk);
  float gate[D], d_gate[D], d_result[D], d_o[D];
  for (int b = 0; b < batch; b++) {
    std::fill(grad.begin(), grad.end(), 0.f);
    std::fill(d_inputs.begin(), d_inputs.end(), 0.f);
    for (int c = chunks - 1; c >= 0; c--) {
      const int first = c * chunk, count = std::min<int>(chunk, tokens - first);
      const int64_t base = (int64_t)b * tokens + first;
      const bf16* rows = projected.data_ptr<bf16>() + base * w.columns();
      bf16* d_rows = d_projected.data_ptr<bf16>() + base * w.columns();
      for (int i = 1 - TAPS; i < count; i++) {
        float* to = inputs.data() + (i + TAPS - 1) * n;
        if (first + i < 0) std::fill(to, to + n, 0.f);
        else read_bf16(rows + (int64_t)i * w.columns(), to, n);
      }
      for (int i = 0; i < count; i++)
        convolve(w, inputs.data() + i * n, sum.data() + i * n, active.data() + i * n);
      for (int h = 0; h < heads; h++) {
        const float rate_of_head = fast_exp(w.a_log[h]);
        std::memcpy(path.data(), states.data_ptr<float>() + (((int64_t)b * chunks + c) * heads + h) * D * D,
                    D * D * sizeof(float));
        for (int i = 0; i < count; i++) {
          prepare(w, active.data() + i * n, rows + (int64_t)i * w.columns(), keep.data_ptr<float>()[base + i],
                  h, line[i]);
          forward_step(path.data() + i * D * D, path.data() + (i + 1) * D * D, line[i]);
        }
        for (int i = count - 1; i >= 0; i--) {
          const Token& t = line[i];
          const bf16* row = rows + (int64_t)i * w.columns();
          bf16* d_row = d_rows + (int64_t)i * w.columns();
          // The gated norm: result = norm * hat * silu(gate), hat = o * scale.
          const float scale = 1.f / std::sqrt(dot(t.o, t.o) / D + GATED_EPS);
          read_bf16(row + n + h * D, gate, D);
          read_bf16(d_out.data_ptr<bf16>() + (base + i) * w.width() + h * D, d_result, D);
          float along = 0, *d_weight = d_norm.data_ptr<float>();
#pragma GCC ivdep
          for (int j = 0; j < D; j++) {
            const float hat = t.o[j] * scale, open = silu(gate[j]);
            d_gate[j] = d_result[j] * w.norm[j] * hat * silu_slope(gate[j]);
            d_weight[j] += d_result[j] * hat * open;
            d_o[j] = d_result[j] * w.norm[j] * open;
            along += d_o[j] * hat;
          }
          for (int j = 0; j < D; j++) d_o[j] = scale * (d_o[j] - t.o[j] * scale * along / D);
          write_bf16(d_gate, d_row + n + h * D, D);
          const TokenGrad d = backward_step(
              grad.data() + h * D * D, path.data() + i * D * D, path.data() + (i + 1) * D * D, t, d_o);
          // The norms of q and k: for y = f x / |x|, dx = f / |x| (dy - y (y dy) / f^2).
          const float along_q = dot(d.q, t.q) / (SCALE * SCALE), along_k = dot(d.k, t.k);
          float *d_q = d_active.data() + i * n + h * D, *d_k = d_q + w.width(), *d_v = d_k + w.width();
          for (int j = 0; j < D; j++) {
            d_q[j] = SCALE * t.q_norm * (d.q[j] - t.q[j] * along_q);
            d_k[j] = t.k_norm * (d.k[j] - t.k[j] * along_k);
            d_v[j] = d.v[j];
          }
          bf16* d_scalars = d_row + 4 * w.width();
          const float d_rate = -rate_of_head * d.log_decay, d_before = d_rate * sigmoid(t.before);
          d_scalars[h] = (bf16)(d.beta * t.beta * (1 - t.beta));
          d_scalars[heads + h] = (bf16)d_before;
          d_a_log.data_ptr<float>()[h] += d_rate * t.rate;
          d_dt_bias.data_ptr<float>()[h] += d_before;
        }
      }
      float* d_w = d_taps.data_ptr<float>();
      for (int i = count - 1; i >= 0; i--) {
        const float *d_a = d_active.data() + i * n, *s = sum.data() + i * n, *x = inputs.data() + i * n;
        float* d_x = d_inputs.data() + i * n;
#pragma GCC ivdep
        for (int j = 0; j < n; j++) {
          const float d_sum = d_a[j] * silu_slope(s[j]);
          for (int tap = 0; tap < TAPS; tap++) {
            d_w[tap * n + j] += d_sum * x[tap * n + j];
            d_x[tap * n + j] += d_sum * w.taps[tap * n + j];
          }
        }
      }
      for (int i = 0; i < count; i++)
        write_bf16(d_inputs.data() + (i + TAPS - 1) * n, d_rows + (int64_t)i * w.columns(), n);
      // What this chunk gives to the last inputs of the one before it.
      std::memmove(d_inputs.data() + chunk * n, d_inputs.data(), (TAPS - 1) * n * sizeof(float));
      std::fill(d_inputs.begin(), d_inputs.begin() + chunk * n, 0.f);
    }
  }
  return {d_projected, d_taps, d_a_log, d_dt_bias, d_norm};
}

// ---- RMSNorm: float32 in, bf16 out, weights around 1 ----------------------------------------------------

std::vector<Tensor> rms_forward(Tensor x, Tensor weight) {
  const int64_t n = x.size(-1), rows = x.numel() / n;
  Tensor out = at::empty(x.sizes(), x.options().dtype(at::kBFloat16)),
         scales = at::empty({rows}, x.options());
  const float *from = x.data_ptr<float>(), *w = weight.data_ptr<float>();
  std::vector<float> result(n);
  for (int64_t r = 0; r < rows; r++, from += n) {
    float squares = 0;
    for (int64_t i = 0; i < n; i++) squares += from[i] * from[i];
    const float scale = scales.data_ptr<float>()[r] = 1.f / std::sqrt(squares / n + EPS);
    for (int64_t i = 0; i < n; i++) result[i] = from[i] * scale * (1.f + w[i]);
    write_bf16(result.data(), out.data_ptr<bf16>() + r * n, n);
  }
  return {out, scales};
}

std::vector<Tensor> rms_backward(Tensor d_out, Tensor x, Tensor weight, Tensor scales) {
  const int64_t n = x.size(-1), rows = x.numel() / n;
  Tensor d_x = at::empty_like(x), d_weight = at::zeros_like(weight);
  const float *from = x.data_ptr<float>(), *w = weight.data_ptr<float>();
  float *to = d_x.data_ptr<float>(), *d_w = d_weight.data_ptr<float>();
  std::vector<float> d(n);
  for (int64_t r = 0; r < rows; r++, from += n, to += n) {
    const float scale = scales.data_ptr<float>()[r];
    float along = 0;
    read_bf16(d_out.data_ptr<bf16>() + r * n, d.data(), n);
    for (int64_t i = 0; i < n; i++) {
      d_w[i] += d[i] * from[i] * scale;
      d[i] *= 1.f + w[i];
      along += d[i] * from[i] * scale;
    }
    for (int64_t i = 0; i < n; i++) to[i] = scale * (d[i] - from[i] * scale * along / n);
  }
  return {d_x, d_weight};
}

// ---- SwiGLU: [gate, up] in, silu(gate) * up out ---------------------------------------------------------

Tensor glu_forward(Tensor x) {
  const int64_t n = x.size(-1) / 2, rows = x.numel() / (2 * n);
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  Tensor out = at::empty(sizes, x.options());
  std::vector<float> both(2 * n), result(n);
  for (int64_t r = 0; r < rows; r++) {
    read_bf16(x.data_ptr<bf16>() + r * 2 * n, both.data(), 2 * n);
    const float *gate = both.data(), *up = gate + n;
    float* to = result.data();
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) to[i] = silu(gate[i]) * up[i];
    write_bf16(to, out.data_ptr<bf16>() + r * n, n);
  }
  return out;
}

Tensor glu_backward(Tensor d_out, Tensor x) {
  const int64_t n = x.size(-1) / 2, rows = x.numel() / (2 * n);
  Tensor d_x = at::empty_like(x);
  std::vector<float> both(2 * n), d_both(2 * n), d(n);
  for (int64_t r = 0; r < rows; r++) {
    read_bf16(x.data_ptr<bf16>() + r * 2 * n, both.data(), 2 * n);
    read_bf16(d_out.data_ptr<bf16>() + r * n, d.data(), n);
    const float *gate = both.data(), *up = gate + n, *from = d.data();
    float *d_gate = d_both.data(), *d_up = d_gate + n;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
      d_gate[i] = from[i] * up[i] * silu_slope(gate[i]);
      d_up[i] = from[i] * silu(gate[i]);
    }
    write_bf16(d_both.data(), d_x.data_ptr<bf16>() + r * 2 * n, 2 * n);
  }
  return d_x;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("gdn_forward", &gdn_forward);
  module.def("gdn_backward", &gdn_backward);
  module.def("rms_forward", &rms_forward);
  module.def("rms_backward", &rms_backward);
  module.def("glu_forward", &glu_forward);
  module.def("glu_backward", &glu_backward);
}
