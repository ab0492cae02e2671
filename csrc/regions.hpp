// Which of a few regions of memory addresses lie in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace disagg {

// Region `k` is `[starts[k], stops[k])`, on the device of number `devices[k]`; `starts` ascend, and none overlap.
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

// Calls `found(i, k)` for each range, `k` being the region that holds it whole, up to the first that none holds; returns
// how many came before that one.
template <typename Found>
std::size_t each_located(const RegionColumns& regions, const RangeColumns& ranges, const Found& found) {
    const auto starts = regions.starts, stops = regions.stops;
    std::size_t k = 0;  // mostly the region of the one before
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
        throw std::invalid_argument("ranges: expected columns of one length, and as much room");
    }
}

}  // namespace detail

// How many ranges come before the first that no region holds whole. Throws `std::invalid_argument` for columns of different
// lengths.
inline std::size_t count_held(const RegionColumns& regions, const RangeColumns& ranges) {
    detail::check_lengths(regions, ranges, ranges.addresses.size());
    return detail::each_located(regions, ranges, [](std::size_t, std::size_t) {});
}

// The region of each range goes to `found`. Returns how many were found before the first that no region holds whole, from
// which on nothing is written. Throws `std::invalid_argument` for columns of different lengths.
inline std::size_t locate(const RegionColumns& regions, const RangeColumns& ranges, std::span<std::int64_t> found) {
    detail::check_lengths(regions, ranges, found.size());
    return detail::each_located(regions, ranges,
                                [&](std::size_t i, std::size_t k) { found[i] = static_cast<std::int64_t>(k); });
}

// As `locate`, but each range goes to `found` with the device of its region.
inline std::size_t describe(const RegionColumns& regions, const RangeColumns& ranges, std::span<Descriptor> found) {
    detail::check_lengths(regions, ranges, found.size());
    return detail::each_located(regions, ranges, [&](std::size_t i, std::size_t k) {
        found[i] = {ranges.addresses[i], ranges.nbytes[i], regions.devices[k]};
    });
}

}  // namespace disagg
