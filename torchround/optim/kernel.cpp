// The update of a segment in one pass: weights, values and gradient in, new ones and the device weights out.
//
// It gives the bits of `update_pass.update_`: each operation is rounded where the source has it (-ffp-contract=off).
// `kind.h`, which `kernel.py` writes, says what is compiled: the rule's arithmetic of one element, which values it keeps,
// and the dtypes. A span of elements is read into arrays of fp32 that stay in the first cache, updated there, and
// written back. So compilers vectorise each conversion by itself, and no buffer is read twice.
#include <cstdint>
#include <cstring>

namespace {

using Numbers = const float *;
constexpr int BLOCK = 128; // elements that share a scale, and the span

template <typename To, typename From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of two sizes");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float root(float x) { return __builtin_sqrtf(x); }
inline float magnitude(float x) { return __builtin_fabsf(x); }

// Dtypes: how a number is kept in memory. Rounding is to the nearest, ties to even, as in PyTorch's casts.
struct Float32 {
    using Kept = float;
    static float read(float x) { return x; }
    static float write(float x) { return x; }
};
struct BFloat16 {
    using Kept = uint16_t;
    static float read(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
    static uint16_t write(float x) {
        const uint32_t b = bits<uint32_t>(x);
        const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
        return uint16_t((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded); // adding could carry out of a NaN
    }
};
// Compilers before GCC 12 and Clang 15 have no such type for x86. They compile all kinds of update without it.
#if defined(__FLT16_MANT_DIG__) || (!defined(__clang__) && __GNUC__ >= 12)
struct Float16 {
    using Kept = _Float16;
    static float read(_Float16 x) { return float(x); }
    static _Float16 write(float x) { return _Float16(x); }
};
#endif

// Weights: one fp32 buffer, or the device weights and a residual (`split_weights.py`).
struct Whole {};
struct Split {};

// Formats of values (`formats.py`).
struct Exact {};
struct Compact {};

// One element's arithmetic, in fp32, which `kind.h` defines; the second function only for rules that can predict.
inline float updated_weight(float weight, float *values, float gradient, float direction, Numbers numbers);
inline float next_step(const float *values, Numbers numbers);

#include "kind.h"

constexpr float TO_INTEGER = 12582912.0f;      // 1.5 x 2^23: a sum with it has the nearest integer in its last bits
constexpr int32_t TO_INTEGER_BITS = 0x4b400000;

// The segment's buffers, in the order of `kernel.py`.
struct Buffers {
    float *weight;
    int16_t *residual;
    const uint16_t *current;
    void *written;
    const void *gradient;
    const void *direction;
    struct {
        void *kept;
        uint16_t *scales;
    } parts[NUM_VALUES + 1]; // one more: C++ has no empty arrays
};

// A span of elements in fp32. `sized` is what a value's scale is made of: the value, or its root.
struct Span {
    float weight[BLOCK], gradient[BLOCK], direction[BLOCK];
    float values[NUM_VALUES + 1][BLOCK], sized[NUM_VALUES + 1][BLOCK];
};

template <typename Dtype> inline void read_kept(float *to, const void *from, int64_t start, int n) {
    const auto *kept = static_cast<const typename Dtype::Kept *>(from) + start;
    for (int i = 0; i < n; ++i) to[i] = Dtype::read(kept[i]);
}

template <typename Dtype> inline void write_kept(void *to, const float *from, int64_t start, int n) {
    auto *kept = static_cast<typename Dtype::Kept *>(to) + start;
    for (int i = 0; i < n; ++i) kept[i] = Dtype::write(from[i]);
}

inline void read_weights(Whole, const Buffers &b, Span &s, int64_t start, int n) {
    read_kept<Float32>(s.weight, b.weight, start, n);
}

inline void read_weights(Split, const Buffers &b, Span &s, int64_t start, int n) {
    const uint16_t *current = b.current + start;
    const int16_t *residual = b.residual + start;
    for (int i = 0; i < n; ++i)
        s.weight[i] = bits<float>((uint32_t(current[i]) << 16) + uint32_t(int32_t(residual[i])));
}

inline void write_weights(Split, const Buffers &b, const Span &s, Numbers, int64_t start, int n) {
    uint16_t *written = static_cast<uint16_t *>(b.written) + start;
    int16_t *residual = b.residual + start;
    for (int i = 0; i < n; ++i) {
        const uint32_t pattern = bits<uint32_t>(s.weight[i]);
        written[i] = uint16_t((pattern + 0x8000u) >> 16);
        residual[i] = int16_t(uint16_t(pattern));
    }
}

template <int V> inline void read_value(Exact, const Buffers &b, Span &s, int64_t start, int n) {
    read_kept<Float32>(s.values[V], b.parts[V].kept, start, n);
}

template <int V> inline void read_value(Compact, const Buffers &b, Span &s, int64_t start, int n) {
    const float scale = BFloat16::read(b.parts[V].scales[start / BLOCK]);
    float *to = s.values[V];
    if constexpr (IS_SIGNED[V]) {
        const int8_t *codes = static_cast<const int8_t *>(b.parts[V].kept) + start;
        for (int i = 0; i < n; ++i) {
            const int32_t code = codes[i];
            to[i] = float(code) / float(254 - (code < 0 ? -code : code)) * scale;
        }
    } else {
        const uint8_t *codes = static_cast<const uint8_t *>(b.parts[V].kept) + start;
        const float unit = scale / 255.0f;
        for (int i = 0; i < n; ++i) {
            const float r = float(int32_t(codes[i])) * unit;
            to[i] = r * r;
        }
    }
}

template <int V> inline void write_value(Exact, const Buffers &b, const Span &s, int64_t start, int n) {
    write_kept<Float32>(b.parts[V].kept, s.values[V], start, n);
}

// The largest magnitude, rounded up to bf16.
inline uint32_t scale_above(const float *numbers, int n) {
    int32_t most = 0; // patterns of magnitudes are in the order of the magnitudes
    for (int i = 0; i < n; ++i) {
        const int32_t pattern = bits<int32_t>(numbers[i]) & 0x7fffffff;
        most = pattern > most ? pattern : most;
    }
    const uint32_t upper = (uint32_t(most) + 0xffffu) >> 16;
    const uint32_t finite = upper > 0x7f7fu ? 0x7f7fu : upper;
    return finite < 0x0d80u ? 0u : finite; // 2^-100
}

template <int V> inline void write_value(Compact, const Buffers &b, const Span &s, int64_t start, int n) {
    const float *from = s.sized[V];
    const uint32_t upper = scale_above(from, n);
    b.parts[V].scales[start / BLOCK] = uint16_t(upper);
    const float scale = bits<float>(upper << 16);
    if constexpr (IS_SIGNED[V]) {
        int8_t *codes = static_cast<int8_t *>(b.parts[V].kept) + start;
        const float least = scale > 0 ? scale : 1.0f;
        for (int i = 0; i < n; ++i)
            codes[i] = int8_t(bits<int32_t>(254.0f * (from[i] / (least + magnitude(from[i]))) + TO_INTEGER));
    } else {
        uint8_t *codes = static_cast<uint8_t *>(b.parts[V].kept) + start;
        const float factor = scale > 0 ? 255.0f / scale : 0.0f;
        for (int i = 0; i < n; ++i) {
            // The pattern of a root above 0 is at least 1, and so is its code.
            const int32_t pattern = bits<int32_t>(from[i]);
            const int32_t lowest = TO_INTEGER_BITS | (pattern < 1 ? pattern : 1);
            const float whole = from[i] * factor; // infinite if the value is
            const int32_t code = bits<int32_t>((whole < 255.0f ? whole : 255.0f) + TO_INTEGER);
            codes[i] = uint8_t(code < lowest ? lowest : code);
        }
    }
}

// Calls for each value.
template <int V = 0> inline void read_values(const Buffers &b, Span &s, int64_t start, int n) {
    if constexpr (V < NUM_VALUES) {
        read_value<V>(Format{}, b, s, start, n);
        read_values<V + 1>(b, s, start, n);
    }
}

template <int V = 0> inline void write_values(const Buffers &b, const Span &s, int64_t start, int n) {
    if constexpr (V < NUM_VALUES) {
        write_value<V>(Format{}, b, s, start, n);
        write_values<V + 1>(b, s, start, n);
    }
}

template <int V = 0> inline void take(float *values, const Span &s, int i) {
    if constexpr (V < NUM_VALUES) {
        values[V] = s.values[V][i];
        take<V + 1>(values, s, i);
    }
}

template <int V = 0> inline void put(Span &s, const float *values, int i) {
    if constexpr (V < NUM_VALUES) {
        s.values[V][i] = values[V];
        if constexpr (IS_COMPACT) s.sized[V][i] = IS_SIGNED[V] ? values[V] : root(values[V]);
        put<V + 1>(s, values, i);
    }
}

inline void write_weights(Whole, const Buffers &b, Span &s, Numbers numbers, int64_t start, int n) {
    write_kept<Float32>(b.weight, s.weight, start, n);
    if constexpr (PREDICTS) {
        // From the values as they are kept, so that the prediction can be repeated from them.
        read_values(b, s, start, n);
        for (int i = 0; i < n; ++i) {
            float values[NUM_VALUES + 1];
            take(values, s, i);
            s.weight[i] = next_step(values, numbers) + s.weight[i];
        }
    }
    write_kept<DeviceWeight>(b.written, s.weight, start, n);
}

// All of a span; it is called with a constant `n` but for the segment's last one.
inline __attribute__((always_inline)) void update_span(const Buffers &b, Numbers given, int64_t start, int n) {
    Span s;
    float numbers[NUM_NUMBERS];
    for (int i = 0; i < NUM_NUMBERS; ++i) numbers[i] = given[i];
    read_weights(Weights{}, b, s, start, n);
    read_kept<Gradient>(s.gradient, b.gradient, start, n);
    if constexpr (USES_DIRECTION) read_kept<Direction>(s.direction, b.direction, start, n);
    read_values(b, s, start, n);
    for (int i = 0; i < n; ++i) {
        float values[NUM_VALUES + 1];
        take(values, s, i);
        const float direction = USES_DIRECTION ? s.direction[i] : 0.0f;
        s.weight[i] = updated_weight(s.weight[i], values, s.gradient[i], direction, numbers);
        put(s, values, i);
    }
    write_values(b, s, start, n);
    write_weights(Weights{}, b, s, numbers, start, n);
}

} // namespace

extern "C" {

// Updates chunks of elements until `*next`, from which all threads take chunks, has reached `stop`. Chunks are whole spans.
void update(const void *buffers, const float *numbers, int64_t *next, int64_t stop, int64_t chunk) {
    Buffers b;
    std::memcpy(&b, buffers, sizeof(void *) * (6 + 2 * NUM_VALUES));
    for (;;) {
        int64_t start = __atomic_fetch_add(next, chunk, __ATOMIC_RELAXED);
        if (start >= stop) return;
        const int64_t end = stop - start < chunk ? stop : start + chunk;
        for (; end - start >= BLOCK; start += BLOCK) update_span(b, numbers, start, BLOCK);
        if (start < end) update_span(b, numbers, start, int(end - start));
    }
}
}
