// Copies between the memory of this process and that of another one on the same machine, through the kernel.
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

// Less than this is not worth a thread of its own.
inline constexpr std::uint64_t kProcessBytesPerThread = std::uint64_t{2} << 20;

// Three columns of one length: addresses here, addresses in another process, bytes.
struct ProcessCopies {
    std::span<const std::uint64_t> local;
    std::span<const std::uint64_t> remote;
    std::span<const std::uint64_t> nbytes;
};

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

// The kernel takes longer over a vector of its own than this process over a piece of less than this.
inline constexpr std::uint64_t kGatherBelow = 1024;
// As much as stays in a core's cache until the kernel reads it, and is not mapped anew each time.
inline constexpr std::uint64_t kRoomNbytes = std::uint64_t{96} << 10;

// Where short pieces of this process lie one behind the other, on their way to another.
class Room {
  public:
    explicit Room(std::uint64_t most) : nbytes_(std::min(most, kRoomNbytes)) {}
    bool fits(std::uint64_t nbytes) const { return used_ + nbytes <= nbytes_; }
    // Copies a piece behind the others, and begins to fetch what is at `next`; where the copy lies.
    std::uint64_t take(std::uint64_t from, std::uint64_t nbytes, std::uint64_t next) {
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

// Copies pieces `[index, stop)` until all are copied, or one fails; 0 or the system's error number.
inline int copy_pieces(int pid, const ProcessCopies& pieces, std::size_t index, std::size_t stop, bool write) {
    const auto& [local, remote, sizes] = pieces;
    // Neighbours are one vector as they lie.
    const auto is_alone = [&](std::size_t i) {
        return (i == 0 || local[i - 1] + sizes[i - 1] != local[i]) &&
               (i + 1 == local.size() || local[i] + sizes[i] != local[i + 1]);
    };
    Room room((stop - index) * kGatherBelow);
    std::uint64_t offset = 0;  // how much of piece `index` has been copied
    while (index < stop) {
        Vectors ours, theirs;
        std::uint64_t total = 0, begin = offset;
        room.clear();
        for (std::size_t i = index; i < stop && !ours.full() && !theirs.full() && total < kMostBytes; ++i) {
            const std::uint64_t nbytes = std::min(sizes[i] - begin, kMostBytes - total);
            std::uint64_t from = local[i] + begin;
            if (write && nbytes < kGatherBelow && is_alone(i)) {
                if (!room.fits(nbytes)) break;
                from = room.take(from, nbytes, local[std::min(i + kPiecesAhead, stop - 1)]);
            }
            ours.add(from, nbytes);
            theirs.add(remote[i] + begin, nbytes);
            total += nbytes;
            begin = 0;
        }
        const ssize_t found = write ? process_vm_writev(pid, ours.data(), ours.size(), theirs.data(), theirs.size(), 0)
                                    : process_vm_readv(pid, ours.data(), ours.size(), theirs.data(), theirs.size(), 0);
        if (found < 0) return errno;
        if (found == 0 && total > 0) return EIO;
        // Fewer than were asked for: the next call says why.
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
// `num_threads` threads. Returns 0 when all is copied, or the system's error number: then any part may have been, and in
// either case nothing is under way any more. None overlap at the destination. Throws `std::invalid_argument` where columns
// are not of one length or there is no thread at all, with nothing copied.
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
