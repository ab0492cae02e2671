// Copies between the memory of this process and that of another one on the same machine, through the kernel.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#if defined(__linux__)
#include <sys/uio.h>
#endif

#include "regions.hpp"
#include "threads.hpp"

namespace disagg {

// Less than this is not worth a thread of its own.
inline constexpr std::uint64_t kProcessBytesPerThread = std::uint64_t{2} << 20;

namespace detail {

// What the kernel takes in one call: vectors on each side, and bytes.
inline constexpr std::size_t kMostVectors = 1024;
inline constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 30;

#if defined(__linux__)
// The vectors of one side in one call: pieces that touch are one.
class Vectors {
  public:
    bool full() const { return size_ == kMostVectors; }
    void add(std::uint64_t address, std::uint64_t nbytes) {
        if (size_ > 0 && end_ == address) {
            vectors_[size_ - 1].iov_len += nbytes;
        } else {
            vectors_[size_++] = {reinterpret_cast<void*>(address), nbytes};
        }
        end_ = address + nbytes;
    }
    const iovec* data() const { return vectors_.data(); }
    unsigned long size() const { return size_; }

  private:
    std::array<iovec, kMostVectors> vectors_;
    std::size_t size_ = 0;
    std::uint64_t end_ = 0;
};

// Copies pieces until all are, or one fails; 0 or the system's error number.
inline int copy_pieces(int pid, std::span<const Descriptor> local, std::span<const Descriptor> remote, bool write) {
    std::size_t index = 0;
    std::uint64_t offset = 0;  // how much of piece `index` has been copied
    while (index < local.size()) {
        Vectors ours, theirs;
        std::uint64_t total = 0, begin = offset;
        for (std::size_t i = index; i < local.size() && !ours.full() && !theirs.full() && total < kMostBytes; ++i) {
            const std::uint64_t nbytes = std::min(local[i].nbytes - begin, kMostBytes - total);
            ours.add(local[i].address + begin, nbytes);
            theirs.add(remote[i].address + begin, nbytes);
            total += nbytes;
            begin = 0;
        }
        const ssize_t found = write ? process_vm_writev(pid, ours.data(), ours.size(), theirs.data(), theirs.size(), 0)
                                    : process_vm_readv(pid, ours.data(), ours.size(), theirs.data(), theirs.size(), 0);
        if (found < 0) return errno;
        if (found == 0 && total > 0) return EIO;
        // Fewer than were asked for: the next call says why.
        auto done = static_cast<std::uint64_t>(found);
        while (index < local.size() && done >= local[index].nbytes - offset) {
            done -= local[index].nbytes - offset;
            offset = 0;
            ++index;
        }
        offset += done;
    }
    return 0;
}
#else
inline int copy_pieces(int, std::span<const Descriptor>, std::span<const Descriptor>, bool) { return ENOSYS; }
#endif

}  // namespace detail

// Copies `local[i]` to `remote[i]` (or back, unless `write`), memory of process `pid`, on up to `num_threads` threads. Returns
// 0 when all is copied, or the system's error number: then any part may have been, and in either case nothing is under way
// any more. Pairs are of one length, none overlap at the destination. Throws `std::invalid_argument` where the sides do not
// match or there is no thread at all, with nothing copied.
inline int copy_between_processes(int pid, std::span<const Descriptor> local, std::span<const Descriptor> remote, bool write,
                                  std::int64_t num_threads) {
    check_num_threads(num_threads);
    if (local.size() != remote.size()) throw std::invalid_argument("descriptors: expected as many on each side");
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < local.size(); ++i) {
        if (local[i].nbytes != remote[i].nbytes) throw std::invalid_argument("descriptors: expected the same lengths");
        if (__builtin_add_overflow(total, local[i].nbytes, &total)) {
            throw std::invalid_argument("nbytes: the sum is not below 2**64");
        }
    }
    const std::size_t shares =
        std::min(num_shares(total, kProcessBytesPerThread, num_threads), std::max<std::size_t>(local.size(), 1));
    std::atomic<int> error = 0;
    run_shares(shares, [&](std::size_t k) {
        const std::size_t start = local.size() * k / shares, stop = local.size() * (k + 1) / shares;
        const int found =
            detail::copy_pieces(pid, local.subspan(start, stop - start), remote.subspan(start, stop - start), write);
        int none = 0;
        if (found != 0) error.compare_exchange_strong(none, found);
    });
    return error;
}

}  // namespace disagg
