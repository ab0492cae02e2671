// Work shared out among threads that live for one call.
//
// Shares write to disjoint memory and only read what they have in common; starting and joining the threads orders the rest.
// So there is no lock and no atomic here, and nothing that the thread sanitizer would have to be told: it is not part of the
// tests, which check with the others that any number of threads gives what one does.
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

// More threads than this for one call help nobody, whatever was asked for.
inline constexpr std::uint64_t kMostThreads = 256;

// How many shares `total` units of work are worth: at most `num_threads`, and none smaller than `least`.
inline std::size_t num_shares(std::uint64_t total, std::uint64_t least, std::int64_t num_threads) {
    const std::uint64_t most = std::min(static_cast<std::uint64_t>(num_threads), kMostThreads);
    return static_cast<std::size_t>(std::clamp<std::uint64_t>(total / least, 1, most));
}

// Calls `work(share)` for each of `shares`, each on a thread of its own, the last on this one; returns when all have
// returned. `work` must not throw. Where no thread is to be had, its share is done here all the same.
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

// Calls `work(start, stop)` for ranges that make up `[0, total)`, none shorter than `least` unless it is the only one.
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
