// Packing of frozen weights: codes and scales of whole groups, with the bits of `packed_formats.py`'s plain operations.
//
// A group is read into fp32 numbers in the first cache. Each step is a loop of its own over them that compilers vectorise.
#include <cstdint>
#include <cstring>

#include "kind.h" // NF4_BOUNDS

namespace {

template <typename To, typename From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of two sizes");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float read(float x) { return x; }
struct BFloat16 {
    uint16_t kept;
};
inline float read(BFloat16 x) { return bits<float>(uint32_t(x.kept) << 16); }
// By integers: compilers before GCC 12 have no such type. The bits of a number are 2^112 times too small, also of a denormal.
struct Float16 {
    uint16_t kept;
};
inline float read(Float16 x) {
    const float magnitude = bits<float>(uint32_t(x.kept & 0x7fffu) << 13) * 0x1p112f;
    const uint32_t not_finite = (x.kept & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return bits<float>(bits<uint32_t>(magnitude) | not_finite | uint32_t(x.kept & 0x8000u) << 16);
}

// Encoders of a group: one code per byte, and the scale.
struct NF4 {
    static constexpr int GROUP = 64, FIRST_SHIFT = 4;
    using Scale = float;
    static Scale encode(const float *numbers, float largest, uint8_t *codes) {
        const float factor = 1.0f / (largest > 1e-38f ? largest : 1e-38f);
        for (int i = 0; i < GROUP; ++i) {
            const float scaled = numbers[i] * factor;
            int32_t code = 0;
            for (const float bound : NF4_BOUNDS) code += scaled > bound;
            codes[i] = uint8_t(code);
        }
        return largest;
    }
};

struct FP8 {
    static constexpr int GROUP = 128, FIRST_SHIFT = -1; // one code per byte
    using Scale = float;
    static Scale encode(const float *numbers, float largest, uint8_t *codes) {
        const float quotient = largest / 448.0f, scale = quotient > 0 ? quotient : 1.0f;
        for (int i = 0; i < GROUP; ++i) {
            const float scaled = numbers[i] / scale, magnitude = __builtin_fabsf(scaled);
            const float bounded = magnitude > 448.0f ? 448.0f : magnitude;
            const uint32_t pattern = bits<uint32_t>(bounded), sign = bits<uint32_t>(scaled) >> 24 & 128u;
            // Below 2^-6 codes are multiples of 2^-9, to which a sum with 2^14 rounds; above, they have three bits of mantissa.
            const uint32_t small = bits<uint32_t>(bounded + 16384.0f) - bits<uint32_t>(16384.0f);
            const uint32_t normal = ((pattern + 0x7ffffu + (pattern >> 20 & 1u)) >> 20) - (120u << 3);
            codes[i] = uint8_t((bounded < 0x1p-6f ? small : normal) | sign);
        }
        return scale;
    }
};

struct MXFP4 {
    static constexpr int GROUP = 32, FIRST_SHIFT = 0;
    using Scale = uint8_t;
    static Scale encode(const float *numbers, float largest, uint8_t *codes) {
        const int32_t exponent = (bits<int32_t>(largest) >> 23) - 2, shared = exponent < 0 ? 0 : exponent;
        const float factor = bits<float>((254 - shared) << 23);
        for (int i = 0; i < GROUP; ++i) {
            const float scaled = __builtin_fabsf(numbers[i] * factor);
            int32_t code = (scaled > 0.25f) + (scaled >= 0.75f) + (scaled > 1.25f) + (scaled >= 1.75f);
            code += (scaled > 2.5f) + (scaled >= 3.5f) + (scaled > 5.0f);
            codes[i] = uint8_t(code | int32_t(bits<uint32_t>(numbers[i]) >> 28 & 8u));
        }
        return Scale(shared);
    }
};

// Returns false at a number that is not finite.
template <typename Format, typename Kept>
inline bool pack_group(const Kept *kept, uint8_t *codes, typename Format::Scale *scale) {
    constexpr int N = Format::GROUP;
    float numbers[N];
    int32_t most = 0; // patterns of magnitudes are in the order of the magnitudes
    for (int i = 0; i < N; ++i) numbers[i] = read(kept[i]);
    for (int i = 0; i < N; ++i) {
        const int32_t pattern = bits<int32_t>(numbers[i]) & 0x7fffffff;
        most = pattern > most ? pattern : most;
    }
    if (most >= 0x7f800000) return false;
    if constexpr (Format::FIRST_SHIFT < 0) {
        *scale = Format::encode(numbers, bits<float>(most), codes);
    } else {
        uint8_t found[N];
        *scale = Format::encode(numbers, bits<float>(most), found);
        for (int i = 0; i < N / 2; ++i)
            codes[i] = uint8_t(found[2 * i] << Format::FIRST_SHIFT | found[2 * i + 1] << (4 - Format::FIRST_SHIFT));
    }
    return true;
}

// Packs chunks until `*next`, from which all threads take chunks of whole groups, has reached `stop`.
template <typename Format, typename Kept>
bool pack(const void *numbers, uint8_t *codes, void *scales, int64_t *next, int64_t stop, int64_t chunk) {
    constexpr int N = Format::GROUP, BYTES = Format::FIRST_SHIFT < 0 ? N : N / 2;
    for (;;) {
        const int64_t start = __atomic_fetch_add(next, chunk, __ATOMIC_RELAXED);
        if (start >= stop) return true;
        const int64_t end = stop - start < chunk ? stop : start + chunk;
        for (int64_t group = start / N; group < end / N; ++group) {
            auto *scale = static_cast<typename Format::Scale *>(scales) + group;
            if (!pack_group<Format>(static_cast<const Kept *>(numbers) + group * N, codes + group * BYTES, scale))
                return false;
        }
    }
}

} // namespace

#define PACK(name, Format, Kept)                                                                                       \
    extern "C" int name(const void *numbers, uint8_t *codes, void *scales, int64_t *next, int64_t stop,                \
                        int64_t chunk) {                                                                               \
        return pack<Format, Kept>(numbers, codes, scales, next, stop, chunk);                                          \
    }
#define PACK_DTYPES(name, Format)                                                                                      \
    PACK(pack_##name##_Float32, Format, float)                                                                         \
    PACK(pack_##name##_BFloat16, Format, BFloat16) PACK(pack_##name##_Float16, Format, Float16)

PACK_DTYPES(nf4, NF4)
PACK_DTYPES(fp8, FP8)
PACK_DTYPES(mxfp4, MXFP4)
