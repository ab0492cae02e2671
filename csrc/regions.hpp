// Which of a few regions of memory contain given ranges of addresses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace disagg {

// Region `k` is `[starts[k], stops[k])` on device number `devices[k]`. `starts` ascend, and regions do not overlap.
struct RegionColumns {
    std::span<const std::uint64_t> starts;
    std::span<const std::uint64_t> stops;
    std::span<const std::uint64_t> devices;
};

// Ranges of memory, `[addresses[i], addresses[i] + nbytes[i])`.
struct RangeColumns {
    std::span<const std::uint64_t> addresses;
    std::span<const std::uint64_t> nbytes;
};

// A range of memory on a device.
struct Descriptor {
    std::uint64_t address;
    std::uint64_t nbytes;
    std::uint64_t device;
};

namespace detail {

// Calls `found(i, k)` for each range `i` and the region `k` that contains it, up to the first range that no region contains.
// Returns the number of ranges before that one.
template <typename Found>
std::size_t each_located(const RegionColumns& regions, const RangeColumns& ranges, const Found& found) {
    const auto starts = regions.starts, stops = regions.stops;
    std::size_t k = 0;  // usually also the region of the next range
    for (std::size_t i = 0; i < ranges.addresses.size(); ++i) {
        const std::uint64_t address = ranges.addresses[i], size = ranges.nbytes[i];
        const auto holds = [&](std::size_t r) {
            return starts[r] <= address && address <= stops[r] && size <= stops[r] - address;
        };
        if (k >= starts.size() || !holds(k)) {
            const auto after = std::upper_bound(starts.begin(), starts.end(), address);
            if (after == starts.begin()) return i;
            k = static_cast<std::size_t>(after - starts.begin()) - 1;
            if (!holds(k)) return i;
        }
        found(i, k);
    }
    return ranges.addresses.size();
}

inline void check_lengths(const RegionColumns& regions, const RangeColumns& ranges, std::size_t num_found) {
    if (regions.starts.size() != regions.stops.size() || regions.starts.size() != regions.devices.size()) {
        throw std::invalid_argument("regions: expected columns of one length");
    }
    if (ranges.addresses.size() != ranges.nbytes.size() || ranges.addresses.size() != num_found) {
        throw std::invalid_argument("ranges: expected columns of one length, and an output of that length");
    }
}

}  // namespace detail

// The number of ranges before the first that no region contains. Throws `std::invalid_argument` for columns of different
// lengths.
inline std::size_t count_held(const RegionColumns& regions, const RangeColumns& ranges) {
    detail::check_lengths(regions, ranges, ranges.addresses.size());
    return detail::each_located(regions, ranges, [](std::size_t, std::size_t) {});
}

// Writes the region of each range to `found`, up to the first range that no region contains. Returns the number written. Throws
// `std::invalid_argument` for columns of different lengths.
inline std::size_t locate(const RegionColumns& regions, const RangeColumns& ranges, std::span<std::int64_t> found) {
    detail::check_lengths(regions, ranges, found.size());
    return detail::each_located(regions, ranges,
                                [&](std::size_t i, std::size_t k) { found[i] = static_cast<std::int64_t>(k); });
}

// Like `locate`, but writes each range with the device of its region.
inline std::size_t describe(const RegionColumns& regions, const RangeColumns& ranges, std::span<Descriptor> found) {
    detail::check_lengths(regions, ranges, found.size());
    return detail::each_located(regions, ranges, [&](std::size_t i, std::size_t k) {
        found[i] = {ranges.addresses[i], ranges.nbytes[i], regions.devices[k]};
    });
}

}  // namespace disagg
