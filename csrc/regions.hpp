// Which of a few regions of memory contain given ranges of addresses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
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

// Blocks of one size: every region is cut into blocks from its start on, what is left at its end being in none, and they are
// counted through all regions; `firsts[k]` of them lie in the regions before `k`. Lists hold `per_list` of them each, in order.
struct BlockCount {
    std::uint64_t nbytes;
    std::uint64_t per_list;
    std::span<const std::uint64_t> firsts;
};

// Which block each range is: the number of its list, and its index there.
struct BlockPlaces {
    std::span<std::int32_t> lists;
    std::span<std::int32_t> indices;
};

// Whether each range is one block. If so, their places go to `found`, and the highest number of a list comes back; -1 if not,
// and `found` is undefined. Throws `std::invalid_argument` for columns of different lengths, blocks of no bytes, lists of no
// block or of more than an int32 can count, and more lists than that.
inline std::int32_t place_blocks(const RegionColumns& regions, const RangeColumns& ranges, const BlockCount& blocks,
                                 const BlockPlaces& found) {
    constexpr std::uint64_t most = std::numeric_limits<std::int32_t>::max();
    detail::check_lengths(regions, ranges, found.lists.size());
    detail::check_lengths(regions, ranges, found.indices.size());
    if (blocks.nbytes == 0 || blocks.per_list == 0 || blocks.per_list > most || blocks.firsts.size() != regions.starts.size()) {
        throw std::invalid_argument(
            "blocks: expected a size above 0, lists of 1 to 2**31 - 1, and a first number for each region");
    }
    for (std::size_t k = 0; k < regions.starts.size(); ++k) {
        const std::uint64_t last = (regions.stops[k] - regions.starts[k]) / blocks.nbytes;
        if (blocks.firsts[k] / blocks.per_list >= most ||
            last / blocks.per_list > most - blocks.firsts[k] / blocks.per_list - 1) {
            throw std::invalid_argument("blocks: more lists than an int32 can count");
        }
    }
    bool whole = true;
    std::uint64_t highest = 0;
    const std::size_t held = detail::each_located(regions, ranges, [&](std::size_t i, std::size_t k) {
        const std::uint64_t offset = ranges.addresses[i] - regions.starts[k], nth = offset / blocks.nbytes;
        whole = whole && ranges.nbytes[i] == blocks.nbytes && nth * blocks.nbytes == offset;
        if (!whole) return;
        std::uint64_t index = blocks.firsts[k] + nth, list = 0;
        if (index >= blocks.per_list) {  // mostly there is one list, and divisions take longer than the rest
            list = index / blocks.per_list;
            index -= list * blocks.per_list;
            highest = std::max(highest, list);
        }
        found.lists[i] = static_cast<std::int32_t>(list);
        found.indices[i] = static_cast<std::int32_t>(index);
    });
    return whole && held == ranges.addresses.size() ? static_cast<std::int32_t>(highest) : -1;
}

}  // namespace disagg
