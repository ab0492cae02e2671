// Work divided between threads that live for one call.
//
// Shares write to disjoint memory and only read shared data. Starting and joining the threads orders all other accesses, so no
// lock or atomic is needed. The tests check that any number of threads gives the same result as one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace disagg {

inline void check_num_threads(std::int64_t num_threads) {
    if (num_threads < 1) {
        throw std::invalid_argument("num_threads: expected at least 1, found " + std::to_string(num_threads));
    }
}

// The most threads of one call. More do not make any call faster.
inline constexpr std::uint64_t kMaxThreads = 256;

// The number of shares for `total` units of work: at most `num_threads`, each of at least `least` units.
inline std::size_t num_shares(std::uint64_t total, std::uint64_t least, std::int64_t num_threads) {
    const std::uint64_t most = std::min(static_cast<std::uint64_t>(num_threads), kMaxThreads);
    return static_cast<std::size_t>(std::clamp<std::uint64_t>(total / least, 1, most));
}

// Calls `work(share)` for each of `shares`, each on a new thread except the last, which the calling thread does. Returns when
// all have returned. `work` must not throw. If a thread cannot be started, the calling thread does its share.
template <typename Work>
void run_shares(std::size_t shares, const Work& work) {
    std::vector<std::jthread> threads;  // joined when it goes out of scope
    threads.reserve(shares);
    for (std::size_t share = 0; share + 1 < shares; ++share) {
        try {
            threads.emplace_back([&work, share] { work(share); });
        } catch (const std::system_error&) {
            work(share);
        }
    }
    work(shares - 1);
}

// Calls `work(start, stop)` for ranges that cover `[0, total)`. Each has at least `least` items, unless there is only one.
template <typename Work>
void share_out(std::size_t total, std::size_t least, std::int64_t num_threads, const Work& work) {
    const std::size_t shares = num_shares(total, least, num_threads);
    run_shares(shares, [&](std::size_t share) {
        const std::size_t each = total / shares, rest = total % shares;
        const std::size_t start = share * each + std::min(share, rest);
        work(start, start + each + (share < rest ? 1 : 0));
    });
}

}  // namespace disagg
