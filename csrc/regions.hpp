// Which of a few regions of memory addresses lie in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

namespace disagg {

// For each `[addresses[i], addresses[i] + nbytes[i])`, the region `[starts[k], stops[k])` that holds it whole goes to
// `found[i]`. `starts` ascend. Returns how many were found before the first that no region holds. Throws
// `std::invalid_argument` for columns of different lengths.
inline std::size_t locate(std::span<const std::uint64_t> starts, std::span<const std::uint64_t> stops,
                          std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> nbytes,
                          std::span<std::int64_t> found) {
    if (starts.size() != stops.size() || addresses.size() != nbytes.size() || addresses.size() != found.size()) {
        throw std::invalid_argument("regions: expected columns of one length on each side");
    }
    std::size_t k = 0;  // mostly the region of the one before
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        const std::uint64_t address = addresses[i];
        const auto holds = [&](std::size_t r) {
            return starts[r] <= address && address <= stops[r] && nbytes[i] <= stops[r] - address;
        };
        if (k >= starts.size() || !holds(k)) {
            const auto after = std::upper_bound(starts.begin(), starts.end(), address);
            if (after == starts.begin()) return i;
            k = static_cast<std::size_t>(after - starts.begin()) - 1;
            if (!holds(k)) return i;
        }
        found[i] = static_cast<std::int64_t>(k);
    }
    return addresses.size();
}

}  // namespace disagg
