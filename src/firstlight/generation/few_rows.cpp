// Decoding on a CPU. Reading the weights takes most of the time, so the weights are read in order,
// and each weight is read only once for all rows.
//
// The first part of this file contains products of a weight matrix with few rows:
//
//   out[m][o] = (sum over k of weight[o][k] * x[m][k]) * scale[o] + bias[o]
//
// The second part contains a whole step of a Llama for one token of each text.
//
// All sums are accumulated in fp32. The order of their terms does not depend on the number of rows
// or threads.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// GROUP: maximum number of rows whose sums fit in registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, GROUP = 8;
#elif defined(__AVX2__)
constexpr int LANES = 8, GROUP = 4;
#else
constexpr int LANES = 4, GROUP = 8;
#endif
constexpr int VECTORS = 2;
constexpr int STEP = LANES * VECTORS;
// The hardware prefetches within a page of 4 KiB, but not across its end.
constexpr long AHEAD_BYTES = 4096;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

template <class T>
static inline T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

struct Bf16 {
  uint16_t bits;
};

static inline Floats widen(const float* from) { return read<Floats>(from); }
#if defined(__AVX512F__)
static inline Floats widen(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(from)));
}
static inline Floats widen(const Bf16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(read<__m256i>(from)), 16));
}
#elif defined(__AVX2__)
static inline Floats widen(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
static inline Floats widen(const Bf16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(read<__m128i>(from)), 16));
}
#else
static inline Floats widen(const int8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Ints), Floats);
}
static inline Floats widen(const Bf16* from) {
  Words words = __builtin_convertvector(read<Halves>(from), Words) << 16;
  return read<Floats>(&words);
}
#endif

static inline float number(float value) { return value; }
static inline float number(int8_t value) { return value; }
static inline float number(Bf16 value) {
  uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  return read<float>(&word);
}

static inline void round_to(float value, float* to) { *to = value; }
static inline void round_to(float value, Bf16* to) {
  uint32_t word = read<uint32_t>(&value);
  if (value != value) {
    to->bits = 0x7fc0;
  } else {
    // Round to nearest, ties to even.
    to->bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
}

static inline float over_lanes(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(values);
#else
  // Add the lanes as a tree. Sequential additions would take as long as all products of a row.
  float lanes[LANES];
  std::memcpy(lanes, &values, sizeof lanes);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

// Computes the products of one row of weights, [k_size], with M rows of x, which are `stride`
// elements apart.
template <class W, int M>
static void dots(const W* weight, const float* x, long stride, long k_size, float* sums) {
  Floats partial[M][VECTORS];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < VECTORS; v++) partial[m][v] = Floats{};
  long k = 0;
  for (; k + STEP <= k_size; k += STEP) {
    // With a single row, out-of-order execution already loads weights ahead of the arithmetic.
    for (unsigned line = 0; M > 1 && line < STEP * sizeof(W); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(weight + k) + AHEAD_BYTES + line, 0, 2);
    Floats w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = widen(weight + k + v * LANES);
    for (int m = 0; m < M; m++)
      for (int v = 0; v < VECTORS; v++)
        partial[m][v] += w[v] * read<Floats>(x + m * stride + k + v * LANES);
  }
  for (int m = 0; m < M; m++) {
    float sum = over_lanes(partial[m][0] + partial[m][1]);
    for (long rest = k; rest < k_size; rest++) sum += number(weight[rest]) * x[m * stride + rest];
    sums[m] = sum;
  }
}

// Computes the same products for `rows` <= M rows.
template <class W, int M = GROUP>
static inline void dots(long rows, const W* weight, const float* x, long stride, long k_size,
                        float* sums) {
  if constexpr (M > 1) {
    if (rows < M) return dots<W, M - 1>(rows, weight, x, stride, k_size, sums);
  }
  dots<W, M>(weight, x, stride, k_size, sums);
}

// A linear layer. weight: [out, in], where `in` is padded if the weights are int8 (see
// `Int8Linear`); scale and bias: [out], or null.
struct Linear {
  const void *weight, *scale, *bias;
};

// Returns the sum of an output times the scale, plus the bias, rounded to T.
template <class T>
static inline T finished(float sum, const T* scale, const T* bias, long o) {
  if (scale) sum *= number(scale[o]);
  if (bias) sum += number(bias[o]);
  T result;
  round_to(sum, &result);
  return result;
}

// Calls `take(m, value)` with output o of each row m of x.
template <class W, class T, class Take>
static inline void outputs(const Linear& layer, long o, const float* x, long stride, long k_size,
                           long rows, const Take& take) {
  const W* weight = static_cast<const W*>(layer.weight) + o * k_size;
  const T *scale = static_cast<const T*>(layer.scale), *bias = static_cast<const T*>(layer.bias);
  float sums[GROUP];
  for (long first = 0; first < rows; first += GROUP) {
    const long count = std::min<long>(GROUP, rows - first);
    dots<W>(count, weight, x + first * stride, stride, k_size, sums);
    for (long m = 0; m < count; m++) take(first + m, finished(sums[m], scale, bias, o));
  }
}

template <class W, class T>
static void product(const Linear& layer, const float* x, T* out, long rows, long k_size,
                    long o_size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long o = 0; o < o_size; o++)
    outputs<W, T>(layer, o, x, k_size, k_size, rows,
                  [&](long m, T value) { out[m * o_size + o] = value; });
}

// A step of a Llama for one token of each of up to `most_rows` texts
//
// As separate calls, the 20 operations of a layer take longer than reading the weights of a small
// model. In this function, the threads synchronise five times per layer. Values are rounded to T at
// the same points as in the model's operations, except that attention uses fp32 internally.

struct Layer {
  Linear q, k, v, o, gate, up, down;
  const void *attention_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm and k_norm: [D], or 0
  void *keys, *values;                                      // [most_rows, K, max_tokens, D]
  long window;  // maximum number of tokens that a query attends to; 0 means all
};

struct Llama {
  const Layer* layers;
  Linear head;
  const void *embedding, *final_norm;
  float* work;  // see `Work`
  long layer_count, hidden, inner, heads, kv_heads, head_dim, vocab, max_tokens, most_rows, padding;
  float eps, scale;
};

// Buffers that all threads share, followed by the buffers of each thread. In a buffer [rows, size],
// each row has `padded(size)` numbers; the padding of inputs to products contains zeros.
struct Work {
  float *x, *q, *k, *v, *y, *inner, *normed, *head, *key, *scores;
  long hidden, queries, keys, width;  // padded row sizes: x, normed; q, y; k, v; inner

  Work(const Llama& m, int thread) {
    const auto padded = [&](long size) { return (size + m.padding - 1) / m.padding * m.padding; };
    float* at = m.work;
    const auto next = [&](long size) {
      float* own = at;
      at += size;
      return own;
    };
    hidden = padded(m.hidden), width = padded(m.inner);
    queries = padded(m.heads * m.head_dim), keys = padded(m.kv_heads * m.head_dim);
    x = next(m.most_rows * hidden), q = next(m.most_rows * queries);
    k = next(m.most_rows * keys), v = next(m.most_rows * keys);
    y = next(m.most_rows * queries), inner = next(m.most_rows * width);
    for (int t = 0; t <= thread; t++) {
      normed = next(m.most_rows * hidden), head = next(padded(m.head_dim));
      key = next(padded(m.head_dim)), scores = next(padded(std::max(m.max_tokens, m.head_dim)));
    }
  }
};

template <class T>
static inline float rounded(float value) {
  T result;
  round_to(value, &result);
  return number(result);
}

// out = x / rms(x) * weight
template <class T>
static void norm(const float* x, const void* weight, long size, float eps, float* out) {
  const T* factors = static_cast<const T*>(weight);
  Floats lanes{};
  long i = 0;
  for (; i + LANES <= size; i += LANES) lanes += read<Floats>(x + i) * read<Floats>(x + i);
  float squares = over_lanes(lanes);
  for (; i < size; i++) squares += x[i] * x[i];
  float factor = 1 / std::sqrt(squares / size + eps);
  for (i = 0; i < size; i++)
    out[i] = rounded<T>(rounded<T>(x[i] * factor) * number(factors[i]));
}

// Rotates the pairs (i, i + D/2), as `apply_rope` does. x and out must not overlap.
template <class T>
static void rotate(const float* x, const float* cos, const float* sin, long size, float* out) {
  for (long i = 0; i < size; i++) {
    float other = i < size / 2 ? -x[i + size / 2] : x[i - size / 2];
    out[i] = rounded<T>(rounded<T>(x[i] * cos[i]) + rounded<T>(other * sin[i]));
  }
}

// Returns e^x in fp32 precision; x is clamped so that the result is a normal number.
static inline Floats exponential(Floats x) {
  x = x < -87.f ? Floats{} - 87.f : x > 88.f ? Floats{} + 88.f : x;
  constexpr float ROUNDING = 12582912;  // 1.5 * 2^23: adding it rounds to an integer
  Floats whole = (x * 1.44269504f + ROUNDING) - ROUNDING;
  Floats rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;  // ln 2 in two parts
  Floats sum = rest * (1 / 720.f) + 1 / 120.f;
  for (float coefficient : {1 / 24.f, 1 / 6.f, 1 / 2.f, 1.f, 1.f}) sum = sum * rest + coefficient;
  Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return sum * read<Floats>(&power);
}

// Computes the weighted mean of the values of the cached tokens and the new token, for N vectors of
// a head.
template <int N, class T>
static inline void weigh(const float* weights, float total, const T* values, const float* last,
                         long count, long head_dim, float* y) {
  Floats sums[N];
  for (int n = 0; n < N; n++) sums[n] = weights[count - 1] * read<Floats>(last + n * LANES);
  for (long s = 0; s + 1 < count; s++)
    for (int n = 0; n < N; n++) sums[n] += weights[s] * widen(values + s * head_dim + n * LANES);
  for (int n = 0; n < N; n++)
    for (int i = 0; i < LANES; i++) y[n * LANES + i] = rounded<T>(sums[n][i] / total);
}

// Computes the attention of one head of a row over the cached tokens and the new token. Writes the
// result [D] to y.
template <class T>
static void attend(const Llama& m, const Layer& layer, const Work& work, const float* cos,
                   const float* sin, long position, long row, long h) {
  const long D = m.head_dim, group = m.heads / m.kv_heads, own = h / group;
  const long cached = (row * m.kv_heads + own) * m.max_tokens * D;
  T *keys = static_cast<T*>(layer.keys) + cached, *values = static_cast<T*>(layer.values) + cached;
  const float *q = work.q + row * work.queries + h * D, *k = work.k + row * work.keys + own * D;
  const float* v = work.v + row * work.keys + own * D;
  float* y = work.y + row * work.queries + h * D;
  // `y` and `scores` are not in use yet, so they can hold the normalised query and key.
  if (layer.q_norm) {
    norm<T>(q, layer.q_norm, D, m.eps, y), q = y;
    norm<T>(k, layer.k_norm, D, m.eps, work.scores), k = work.scores;
  }
  rotate<T>(q, cos, sin, D, work.head);
  rotate<T>(k, cos, sin, D, work.key);
  if (h % group == 0)
    for (long d = 0; d < D; d++) {
      round_to(work.key[d], keys + position * D + d);
      round_to(v[d], values + position * D + d);
    }
  const long first = layer.window ? std::max(0L, position + 1 - layer.window) : 0;
  const long count = position + 1 - first;
  // The key of the new token comes last. It is read from this thread's copy, because another thread
  // may still be writing it to the cache.
  const auto score = [&](auto* key) {
    Floats sum{};
    for (long d = 0; d < D; d += LANES) sum += widen(key + d) * read<Floats>(work.head + d);
    return over_lanes(sum) * m.scale;
  };
  for (long s = 0; s + 1 < count; s++) work.scores[s] = score(keys + (first + s) * D);
  work.scores[count - 1] = score(static_cast<const float*>(work.key));
  float most = work.scores[0];
  for (long s = 1; s < count; s++) most = std::max(most, work.scores[s]);
  float total = 0;
  for (long s = 0; s < count; s += LANES) {
    Floats lanes{};
    const long here = std::min<long>(LANES, count - s);
    std::memcpy(&lanes, work.scores + s, here * sizeof(float));
    lanes = exponential(lanes - most);
    std::memcpy(work.scores + s, &lanes, here * sizeof(float));
    for (long i = 0; i < here; i++) total += lanes[i];
  }
  long d = 0;
  for (; d + VECTORS * LANES <= D; d += VECTORS * LANES)
    weigh<VECTORS>(work.scores, total, values + first * D + d, v + d, count, D, y + d);
  for (; d < D; d += LANES)
    weigh<1>(work.scores, total, values + first * D + d, v + d, count, D, y + d);
}

// Computes a decoding step. tokens, positions: [rows]; cos, sin: [rows, D]; logits: [rows, V].
template <class W, class T>
static void step(const Llama& m, const float* cos, const float* sin, const long* tokens,
                 const long* positions, long rows, T* logits, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const Work work(m, omp_get_thread_num());
    const auto padded = [&](long size) {
      return sizeof(W) == 1 ? (size + m.padding - 1) / m.padding * m.padding : size;
    };
    const long C = m.hidden, D = m.head_dim, q_size = m.heads * D, kv_size = m.kv_heads * D;
    const auto norm_rows = [&](const void* weight) {
      // Every thread computes all norms, because that takes less time than synchronising.
      for (long r = 0; r < rows; r++)
        norm<T>(work.x + r * work.hidden, weight, C, m.eps, work.normed + r * work.hidden);
    };
    const auto of_normed = [&](const Linear& layer, long o, const auto& take) {
      outputs<W, T>(layer, o, work.normed, work.hidden, padded(C), rows, take);
    };
    // Adds a product to the residual stream.
    const auto add = [&](const Linear& layer, const float* y, long stride, long size) {
#pragma omp for schedule(static)
      for (long o = 0; o < C; o++)
        outputs<W, T>(layer, o, y, stride, padded(size), rows, [&](long r, T value) {
          float& x = work.x[r * work.hidden + o];
          x = rounded<T>(x + number(value));
        });
    };
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++)
      for (long c = 0; c < C; c++)
        work.x[r * work.hidden + c] = number(static_cast<const T*>(m.embedding)[tokens[r] * C + c]);
    for (long l = 0; l < m.layer_count; l++) {
      const Layer& layer = m.layers[l];
      norm_rows(layer.attention_norm);
#pragma omp for schedule(static)
      for (long i = 0; i < q_size + 2 * kv_size; i++) {
        const bool is_q = i < q_size, is_k = !is_q && i < q_size + kv_size;
        const long o = is_q ? i : (i - q_size) % kv_size, stride = is_q ? work.queries : work.keys;
        float* out = (is_q ? work.q : is_k ? work.k : work.v) + o;
        of_normed(is_q ? layer.q : is_k ? layer.k : layer.v, o,
                  [&](long r, T value) { out[r * stride] = number(value); });
      }
      // Distribute neighbouring heads over different threads, because texts have different lengths.
#pragma omp for schedule(static, 1)
      for (long i = 0; i < rows * m.heads; i++) {
        const long r = i / m.heads;
        attend<T>(m, layer, work, cos + r * D, sin + r * D, positions[r], r, i % m.heads);
      }
      add(layer.o, work.y, work.queries, q_size);
      norm_rows(layer.mlp_norm);
#pragma omp for schedule(static)
      for (long o = 0; o < m.inner; o++) {
        float* inner = work.inner + o;
        of_normed(layer.gate, o, [&](long r, T value) { inner[r * work.width] = number(value); });
        of_normed(layer.up, o, [&](long r, T value) {
          float& gate = inner[r * work.width];
          float silu = gate / (1 + exponential(Floats{} - gate)[0]);
          gate = rounded<T>(rounded<T>(silu) * number(value));
        });
      }
      add(layer.down, work.inner, work.width, m.inner);
    }
    norm_rows(m.final_norm);
#pragma omp for schedule(static)
    for (long o = 0; o < m.vocab; o++)
      of_normed(m.head, o, [&](long r, T value) { logits[r * m.vocab + o] = value; });
  }
}

#define KERNELS(NAME, W, T)                                                                       \
  extern "C" void product_##NAME(const void* weight, const void* scale, const void* bias,         \
                                 const float* x, void* out, long rows, long k_size, long o_size,  \
                                 int threads) {                                                   \
    product<W>({weight, scale, bias}, x, static_cast<T*>(out), rows, k_size, o_size, threads);    \
  }                                                                                               \
  extern "C" void step_##NAME(const Llama* model, const float* cos, const float* sin,             \
                              const long* tokens, const long* positions, long rows, void* logits, \
                              int threads) {                                                      \
    step<W>(*model, cos, sin, tokens, positions, rows, static_cast<T*>(logits), threads);         \
  }

KERNELS(float32, float, float)
KERNELS(bfloat16, Bf16, Bf16)
KERNELS(int8, int8_t, Bf16)
