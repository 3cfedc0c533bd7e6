// Products of a weight matrix with few rows, as decoding has them: reading the weights is what
// takes the time, so they are read once, in order, and asked for far ahead.
//
// out[m][o] = sum over k of weight[o][k] * x[m][k], times scale[o], plus bias[o]
//
// All sums are in fp32, and of the same order whatever the number of rows and threads.

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, GROUP = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, GROUP = 2;
#else
constexpr int LANES = 4, GROUP = 4;
#endif
constexpr int VECTORS = 4;
constexpr int STEP = LANES * VECTORS;
// Within a page of 4 KiB the hardware looks ahead by itself; it stops at the page's end.
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
    // To nearest, ties to even.
    to->bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
}

// In a tree: one after the other, the additions would take as long as all the products of a row.
static inline float over_lanes(Floats values) {
  float lanes[LANES];
  std::memcpy(lanes, &values, sizeof lanes);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <class W, int M, bool ASK>
static inline void dots(const W* weight, const float* x, long k_size, float* sums) {
  Floats partial[M][VECTORS];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < VECTORS; v++) partial[m][v] = Floats{};
  long k = 0;
  for (; k + STEP <= k_size; k += STEP) {
    if (ASK) {
      const char* ahead = reinterpret_cast<const char*>(weight + k) + AHEAD_BYTES;
      for (unsigned line = 0; line < STEP * sizeof(W); line += 64)
        __builtin_prefetch(ahead + line, 0, 3);
    }
    Floats w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = widen(weight + k + v * LANES);
    for (int m = 0; m < M; m++)
      for (int v = 0; v < VECTORS; v++)
        partial[m][v] += w[v] * read<Floats>(x + m * k_size + k + v * LANES);
  }
  for (int m = 0; m < M; m++) {
    Floats whole = (partial[m][0] + partial[m][1]) + (partial[m][2] + partial[m][3]);
    float sum = over_lanes(whole);
    for (long rest = k; rest < k_size; rest++) sum += number(weight[rest]) * x[m * k_size + rest];
    sums[m] = sum;
  }
}

template <class W, class T>
static void product(const W* weight, const T* scale, const T* bias, const float* x, T* out,
                    long rows, long k_size, long o_size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long o = 0; o < o_size; o++) {
    const W* own = weight + o * k_size;
    for (long m = 0; m < rows;) {
      float sums[GROUP];
      const float* at = x + m * k_size;
      int count = 1;
      if (rows - m >= GROUP) {
        count = GROUP;
        m == 0 ? dots<W, GROUP, true>(own, at, k_size, sums)
               : dots<W, GROUP, false>(own, at, k_size, sums);
      } else {
        m == 0 ? dots<W, 1, true>(own, at, k_size, sums)
               : dots<W, 1, false>(own, at, k_size, sums);
      }
      for (int i = 0; i < count; i++) {
        float value = sums[i];
        if (scale) value *= number(scale[o]);
        if (bias) value += number(bias[o]);
        round_to(value, out + (m + i) * o_size + o);
      }
      m += count;
    }
  }
}

#define PRODUCT(NAME, W, T)                                                                       \
  extern "C" void NAME(const void* weight, const void* scale, const void* bias, const void* x,    \
                       void* out, long rows, long k_size, long o_size, int threads) {             \
    product(static_cast<const W*>(weight), static_cast<const T*>(scale),                          \
            static_cast<const T*>(bias), static_cast<const float*>(x), static_cast<T*>(out),      \
            rows, k_size, o_size, threads);                                                       \
  }

PRODUCT(product_float32, float, float)
PRODUCT(product_bfloat16, Bf16, Bf16)
PRODUCT(product_int8, int8_t, Bf16)
