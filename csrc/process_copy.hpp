// Copies between the memory of this process and that of another process on the same host, made by the kernel.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>

#if defined(__linux__)
#include <sys/uio.h>
#endif

#include "copy.hpp"
#include "threads.hpp"

namespace disagg {

// Each thread of a copy gets at least this many bytes.
inline constexpr std::uint64_t kProcessBytesPerThread = std::uint64_t{2} << 20;

// Three columns of one length: addresses in this process, addresses in the other process, lengths.
struct ProcessCopies {
    std::span<const std::uint64_t> local;
    std::span<const std::uint64_t> remote;
    std::span<const std::uint64_t> nbytes;
};

namespace detail {

// The limits of one call of the kernel: vectors on each side, and bytes.
inline constexpr std::size_t kMaxVectors = 1024;
inline constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30;

#if defined(__linux__)
// The vectors of one side in one call. Adjacent pieces share a vector.
class Vectors {
  public:
    bool full() const { return size_ == kMaxVectors; }
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
    std::array<iovec, kMaxVectors> vectors_;
    std::size_t size_ = 0;
    std::uint64_t end_ = 0;
};

// Pieces shorter than this are gathered first: that takes this process less time than a vector of its own takes the kernel.
inline constexpr std::uint64_t kGatherBelow = 1024;
// The size of the gathered bytes of one call: they stay in a core's cache until the kernel reads them, and the allocator
// does not map such a block anew each time.
inline constexpr std::uint64_t kGatherNbytes = std::uint64_t{96} << 10;

// A buffer that gathers short pieces of this process on their way to the other.
class GatherBuffer {
  public:
    explicit GatherBuffer(std::uint64_t largest) : nbytes_(std::min(largest, kGatherNbytes)) {}
    bool fits(std::uint64_t nbytes) const { return used_ + nbytes <= nbytes_; }
    // Appends a copy of a piece and returns its address. Prefetches the piece at `next`.
    std::uint64_t append(std::uint64_t from, std::uint64_t nbytes, std::uint64_t next) {
        if (bytes_ == nullptr) bytes_ = std::make_unique_for_overwrite<unsigned char[]>(nbytes_);
        const std::uint64_t to = reinterpret_cast<std::uintptr_t>(bytes_.get()) + used_;
        prefetch<false>(next, nbytes);
        copy_piece<false>(to, from, nbytes);
        used_ += nbytes;
        return to;
    }
    void clear() { used_ = 0; }

  private:
    std::unique_ptr<unsigned char[]> bytes_;
    std::uint64_t nbytes_;
    std::uint64_t used_ = 0;
};

// Copies pieces `[index, stop)` until all are copied or one fails. Returns 0 or the system's error number.
inline int copy_pieces(int pid, const ProcessCopies& pieces, std::size_t index, std::size_t stop, bool write) {
    const auto& [local, remote, sizes] = pieces;
    // A piece with an adjacent neighbour shares its vector, so it is not gathered.
    const auto is_alone = [&](std::size_t i) {
        return (i == 0 || local[i - 1] + sizes[i - 1] != local[i]) &&
               (i + 1 == local.size() || local[i] + sizes[i] != local[i + 1]);
    };
    GatherBuffer gathered((stop - index) * kGatherBelow);
    std::uint64_t offset = 0;  // bytes of piece `index` that have been copied
    while (index < stop) {
        Vectors local_vectors, remote_vectors;
        std::uint64_t total = 0, begin = offset;
        gathered.clear();
        for (std::size_t i = index; i < stop && !local_vectors.full() && !remote_vectors.full() && total < kMaxBytes; ++i) {
            const std::uint64_t nbytes = std::min(sizes[i] - begin, kMaxBytes - total);
            std::uint64_t from = local[i] + begin;
            if (write && nbytes < kGatherBelow && is_alone(i)) {
                if (!gathered.fits(nbytes)) break;
                from = gathered.append(from, nbytes, local[std::min(i + kPiecesAhead, stop - 1)]);
            }
            local_vectors.add(from, nbytes);
            remote_vectors.add(remote[i] + begin, nbytes);
            total += nbytes;
            begin = 0;
        }
        const ssize_t found = write ? process_vm_writev(pid, local_vectors.data(), local_vectors.size(), remote_vectors.data(),
                                                        remote_vectors.size(), 0)
                                    : process_vm_readv(pid, local_vectors.data(), local_vectors.size(), remote_vectors.data(),
                                                       remote_vectors.size(), 0);
        if (found < 0) return errno;
        if (found == 0 && total > 0) return EIO;
        // After a partial copy the next call returns the error.
        auto done = static_cast<std::uint64_t>(found);
        while (index < stop && done >= sizes[index] - offset) {
            done -= sizes[index] - offset;
            offset = 0;
            ++index;
        }
        offset += done;
    }
    return 0;
}
#else
inline int copy_pieces(int, const ProcessCopies&, std::size_t, std::size_t, bool) { return ENOSYS; }
#endif

}  // namespace detail

// Copies `nbytes[i]` bytes from address `local[i]` to address `remote[i]` of process `pid` (or back, unless `write`), on up to
// `num_threads` threads. Returns 0 or the system's error number. After an error any part may have been copied; in either case
// no copy is still running. The caller guarantees that destinations are disjoint. Throws `std::invalid_argument`, with nothing
// copied, for columns of different lengths, a sum of 2**64 bytes and more, or `num_threads` below 1.
inline int copy_between_processes(int pid, const ProcessCopies& pieces, bool write, std::int64_t num_threads) {
    check_num_threads(num_threads);
    const std::size_t count = pieces.nbytes.size();
    if (pieces.local.size() != count || pieces.remote.size() != count) {
        throw std::invalid_argument("copies: expected columns of one length");
    }
    const std::uint64_t total = detail::total_nbytes(pieces.nbytes);
    const std::size_t shares =
        std::min(num_shares(total, kProcessBytesPerThread, num_threads), std::max<std::size_t>(count, 1));
    std::atomic<int> error = 0;
    run_shares(shares, [&](std::size_t k) {
        const int found = detail::copy_pieces(pid, pieces, count * k / shares, count * (k + 1) / shares, write);
        int none = 0;
        if (found != 0) error.compare_exchange_strong(none, found);
    });
    return error;
}

}  // namespace disagg
