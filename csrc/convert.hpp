// Conversion of numbers between the element formats of caches, as the engines' own quantisers store them.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace disagg {

// As in disagg/core/formats.py.
enum class Rounding { kNearest, kUnbounded, kTowardZero };

namespace detail {

// A small float: its sign, `E` bits of exponent and `M` of mantissa. `Finite`: no infinities, and one NaN of each sign
// (e4m3fn).
template <int E, int M, bool Finite>
struct SmallFloat {
    using Bits = std::conditional_t<E + M + 1 == 8, std::uint8_t, std::uint16_t>;
    static constexpr int kBias = (1 << (E - 1)) - 1;
    static constexpr std::uint32_t kNan = (std::uint32_t{1} << (E + M)) - 1;  // all ones
    static constexpr std::uint32_t kInfinity = kNan & ~((std::uint32_t{1} << M) - 1);
    static constexpr std::uint32_t kLargest = Finite ? kNan - 1 : kInfinity - 1;

    static float widen(Bits stored) {
        const std::uint32_t sign = std::uint32_t{stored} >> (E + M), rest = std::uint32_t{stored} & kNan;
        const std::uint32_t exponent = rest >> M, mantissa = rest & ((std::uint32_t{1} << M) - 1);
        const std::uint32_t top = (std::uint32_t{1} << E) - 1;
        std::uint32_t bits = 0;
        if (Finite ? rest == kNan : exponent == top) {
            bits = 0x7f800000u | (mantissa << (23 - M));
        } else if (exponent > 0) {
            bits = ((exponent + 127 - kBias) << 23) | (mantissa << (23 - M));
        } else {  // the product is exact, and normal or zero
            constexpr float kStep = std::bit_cast<float>(static_cast<std::uint32_t>(127 + 1 - kBias - M) << 23);
            bits = std::bit_cast<std::uint32_t>(static_cast<float>(mantissa) * kStep);
        }
        return std::bit_cast<float>(bits | (sign << 31));
    }

    // A NaN keeps its sign, unless numbers are rounded toward zero.
    template <Rounding How>
    static Bits narrow(float number) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(number), sign = (bits >> 31) << (E + M);
        std::uint32_t rest = bits & 0x7fffffffu, stored = 0;
        constexpr std::uint32_t kLeastNormal = static_cast<std::uint32_t>(128 - kBias) << 23;
        constexpr std::uint32_t kLargestAsFloat =
            (((kLargest >> M) + 127 - kBias) << 23) | ((kLargest & ((std::uint32_t{1} << M) - 1)) << (23 - M));
        if constexpr (How == Rounding::kTowardZero) {
            if (rest == 0) return 0;
            if (rest > 0x7f800000u) return static_cast<Bits>(kLargest);
            if (rest >= kLargestAsFloat) {
                stored = kLargest;
            } else if (rest < kLeastNormal) {
                constexpr float kSteps = std::bit_cast<float>(static_cast<std::uint32_t>(127 - 1 + kBias + M) << 23);
                stored = static_cast<std::uint32_t>(std::bit_cast<float>(rest) * kSteps);
            } else {
                stored = (rest - (static_cast<std::uint32_t>(127 - kBias) << 23)) >> (23 - M);
            }
        } else if (rest > 0x7f800000u) {
            stored = Finite || E + M == 7 ? kNan : kInfinity | (std::uint32_t{1} << (M - 1));
        } else if (How == Rounding::kNearest && rest >= kLargestAsFloat) {
            stored = kLargest;
        } else if (rest < kLeastNormal) {  // adding this power of two leaves a multiple of the smallest number, rounded
            constexpr std::uint32_t kMagic = static_cast<std::uint32_t>(127 + 24 - kBias - M) << 23;
            const float sum = std::bit_cast<float>(rest) + std::bit_cast<float>(kMagic);
            stored = std::bit_cast<std::uint32_t>(sum) - kMagic;
        } else {
            rest += (std::uint32_t{1} << (22 - M)) - 1 + ((rest >> (23 - M)) & 1);
            stored = (rest - (static_cast<std::uint32_t>(127 - kBias) << 23)) >> (23 - M);
            const std::uint32_t beyond = Finite ? kNan : kInfinity;
            if (stored > beyond) stored = beyond;
        }
        return static_cast<Bits>(stored | sign);
    }
};

struct Float32 {
    using Bits = float;
    static float widen(float number) { return number; }
    template <Rounding>
    static float narrow(float number) {
        return number;
    }
};

struct BFloat16 {
    using Bits = std::uint16_t;
    static float widen(Bits stored) { return std::bit_cast<float>(std::uint32_t{stored} << 16); }
    template <Rounding>
    static Bits narrow(float number) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(number);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bits>((bits >> 31 << 15) | 0x7fc0u);
        return static_cast<Bits>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
};

using Float16 = SmallFloat<5, 10, false>;
using Float8E4M3 = SmallFloat<4, 3, true>;
using Float8E5M2 = SmallFloat<5, 2, false>;

enum class Scaling { kNone, kMultiply, kDivide };

// Converts `count` numbers. Both may be at any address.
using ConvertRun = void (*)(const std::byte* from, std::byte* to, std::size_t count, float scale);

template <typename From, typename To, Scaling How, Rounding Rounded>
void convert_run(const std::byte* from, std::byte* to, std::size_t count, float scale) {
    for (std::size_t i = 0; i < count; ++i) {
        typename From::Bits stored;
        std::memcpy(&stored, from + i * sizeof stored, sizeof stored);
        float number = From::widen(stored);
        if constexpr (How == Scaling::kMultiply) number *= scale;
        if constexpr (How == Scaling::kDivide) number /= scale;
        const typename To::Bits result = To::template narrow<Rounded>(number);
        std::memcpy(to + i * sizeof result, &result, sizeof result);
    }
}

}  // namespace detail

// How the numbers of a span are converted on their way: sizes in bytes of an element on either side.
struct Conversion {
    detail::ConvertRun run = nullptr;  // none: bytes are copied
    std::uint64_t source_itemsize = 1;
    std::uint64_t destination_itemsize = 1;

    bool operator==(const Conversion&) const = default;
};

namespace detail {

template <typename From, typename To, Scaling How, Rounding Rounded = Rounding::kUnbounded>
Conversion conversion_of() {
    return {&convert_run<From, To, How, Rounded>, sizeof(typename From::Bits), sizeof(typename To::Bits)};
}

template <typename From, typename To>
Conversion conversion_into(Rounding rounding) {
    switch (rounding) {
        case Rounding::kNearest:
            return conversion_of<From, To, Scaling::kDivide, Rounding::kNearest>();
        case Rounding::kUnbounded:
            return conversion_of<From, To, Scaling::kDivide, Rounding::kUnbounded>();
        default:
            return conversion_of<From, To, Scaling::kDivide, Rounding::kTowardZero>();
    }
}

template <typename From>
Conversion conversion_from(std::string_view to, Rounding rounding) {
    constexpr bool quantised = sizeof(typename From::Bits) == 1;
    constexpr Scaling out = quantised ? Scaling::kMultiply : Scaling::kNone;
    if (to == "float32") return conversion_of<From, Float32, out>();
    if (to == "bfloat16") return conversion_of<From, BFloat16, out>();
    if (to == "float16") return conversion_of<From, Float16, out>();
    if constexpr (!quantised) {
        if (to == "float8_e4m3fn") return conversion_into<From, Float8E4M3>(rounding);
        if (to == "float8_e5m2") return conversion_into<From, Float8E5M2>(rounding);
    }
    return {};
}

}  // namespace detail

// The conversion between two formats, by torch's names of dtypes. Numbers are divided by a scale on their way into a format of
// 8 bits, in single precision, and multiplied on their way out. Throws `std::invalid_argument` if there is none.
inline Conversion conversion(std::string_view from, std::string_view to, std::string_view how) {
    using namespace detail;
    Rounding rounding = Rounding::kNearest;
    if (how == "unbounded") {
        rounding = Rounding::kUnbounded;
    } else if (how == "toward_zero") {
        rounding = Rounding::kTowardZero;
    } else if (how != "nearest") {
        throw std::invalid_argument("rounding: expected nearest, unbounded or toward_zero, found " + std::string(how));
    }
    Conversion found;
    if (from == "float32") found = conversion_from<Float32>(to, rounding);
    if (from == "bfloat16") found = conversion_from<BFloat16>(to, rounding);
    if (from == "float16") found = conversion_from<Float16>(to, rounding);
    if (from == "float8_e4m3fn") found = conversion_from<Float8E4M3>(to, rounding);
    if (from == "float8_e5m2") found = conversion_from<Float8E5M2>(to, rounding);
    if (found.run == nullptr) {
        throw std::invalid_argument("conversion: expected formats with a rule between them, found " + std::string(from) +
                                    " and " + std::string(to));
    }
    return found;
}

}  // namespace disagg
