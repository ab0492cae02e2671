// The Python module `disagg.core._native`. Its functions release the GIL while they work, except for work that takes less time
// than taking the GIL back. This file binds runs of indices, regions, copies and digests.
#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <tuple>
#include <vector>

#include "copy.hpp"
#include "digest.hpp"
#include "group_runs.hpp"
#include "process_copy.hpp"
#include "regions.hpp"

namespace disagg::python {

namespace {

// ------------------------------------------------------------------------------------------------------------- index runs

using Int64Array = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;
using Runs = std::tuple<Int64Array, Int64Array, Int64Array>;

struct Free {
    void operator()(std::int64_t* memory) const noexcept { std::free(memory); }
};
using Buffer = std::unique_ptr<std::int64_t, Free>;

Buffer allocate(std::size_t count) {
    Buffer memory{static_cast<std::int64_t*>(std::malloc((count ? count : 1) * sizeof(std::int64_t)))};
    if (!memory) throw std::bad_alloc();
    return memory;
}

template <typename S, typename D>
Runs group_runs(const Column<S>& source, const Column<D>& destination) {
    using Groups = RunGroups<S, D>;
    Buffer memory;
    std::size_t count = 0;
    {
        const ReleaseGilToWork released;
        const std::unique_ptr<std::uint64_t[]> words(new std::uint64_t[Groups::num_words(source.shape(0)) + 1]);
        const Groups groups(view(source), view(destination), words.get());
        count = groups.num_runs();
        memory = allocate(3 * count);
        std::int64_t* const p = memory.get();
        groups.write({p, p + count, p + 2 * count});
    }
    std::int64_t* const p = memory.get();
    const nb::capsule owner(p, [](void* pointer) noexcept { std::free(pointer); });
    memory.release();
    return {Int64Array(p, {count}, owner), Int64Array(p + count, {count}, owner), Int64Array(p + 2 * count, {count}, owner)};
}

template <typename S, typename D, typename... Doc>
void bind_group_runs(nb::module_& m, const Doc&... doc) {
    m.def("group_concurrent_contiguous", &group_runs<S, D>, "source"_a.noconvert(), "destination"_a.noconvert(), doc...);
}

const char* const kGroupRunsDoc =
    "Maximal runs in which both lists step by one: (source starts, destination starts, lengths), int64.\n\n"
    "Pairs with a negative id belong to no run. If either side is empty there are no runs.\n"
    "Takes contiguous 1-D int64 or int32 arrays, without copying. ValueError: the lengths differ.";

// ---------------------------------------------------------------------------------------------------------------- regions

// Regions of memory; keeps the arrays alive.
struct Regions {
    Addresses starts;
    Addresses stops;
    Addresses devices;

    RegionColumns columns() const { return {view(starts), view(stops), view(devices)}; }
};

using Descriptors = nb::ndarray<std::uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
static_assert(sizeof(Descriptor) == 3 * sizeof(std::uint64_t));

std::size_t locate_ranges(const Regions& self, const Addresses& addresses, const Addresses& nbytes,
                          const MutableColumn<std::int64_t>& out) {
    const ReleaseGilIfLarge released(addresses.shape(0));
    return locate(self.columns(), {view(addresses), view(nbytes)}, view(out));
}

std::size_t describe_ranges(const Regions& self, const Addresses& addresses, const Addresses& nbytes, const Descriptors& out) {
    const ReleaseGilIfLarge released(addresses.shape(0));
    auto* const rows = reinterpret_cast<Descriptor*>(out.data());
    return describe(self.columns(), {view(addresses), view(nbytes)}, {rows, out.shape(0)});
}

std::size_t count_held_ranges(const Regions& self, const Addresses& addresses, const Addresses& nbytes) {
    const ReleaseGilIfLarge released(addresses.shape(0));
    return count_held(self.columns(), {view(addresses), view(nbytes)});
}

void bind_regions(nb::module_& m) {
    nb::class_<Regions>(m, "Regions", "Regions of memory [starts[k], stops[k]) on device number devices[k]; starts ascend.")
        .def(nb::init<Addresses, Addresses, Addresses>(), "starts"_a.noconvert(), "stops"_a.noconvert(),
             "devices"_a.noconvert())
        .def("locate", &locate_ranges, "addresses"_a.noconvert(), "nbytes"_a.noconvert(), "out"_a.noconvert(),
             "Write to `out` (int64) the index of the region that contains each range of memory. Returns how many ranges\n"
             "precede the first that no region contains; nothing is written from there on. ValueError: columns of different\n"
             "lengths.")
        .def("describe", &describe_ranges, "addresses"_a.noconvert(), "nbytes"_a.noconvert(), "out"_a.noconvert(),
             "Like locate; `out` gets uint64 rows (address, length, device number).")
        .def("count_held", &count_held_ranges, "addresses"_a.noconvert(), "nbytes"_a.noconvert(),
             "How many ranges precede the first that no region contains. ValueError as for locate.");
}

// ----------------------------------------------------------------------------------------------------- copies and digests

std::uint64_t copy_columns(const Addresses& source, const Addresses& destination, const Addresses& nbytes,
                           std::int64_t num_threads) {
    const ReleaseGilToWork released;
    return copy_batch({view(source), view(destination), view(nbytes)}, num_threads);
}

std::uint64_t total_nbytes(const Addresses& nbytes) {
    const ReleaseGilIfLarge released(nbytes.shape(0));
    return std::accumulate(nbytes.data(), nbytes.data() + nbytes.shape(0), std::uint64_t{0});
}

int copy_process_columns(int pid, const Addresses& local, const Addresses& remote, const Addresses& nbytes, bool write,
                         std::int64_t num_threads) {
    const ProcessCopies pieces{view(local), view(remote), view(nbytes)};
    const ReleaseGilToWork released;
    return copy_between_processes(pid, pieces, write, num_threads);
}

using Sums = std::optional<MutableColumn<std::uint64_t>>;
using Axes = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;

std::uint64_t digest_columns(const Column<std::int64_t>& layers, const Addresses& bases, const RunTable& runs, const Axes& axes,
                             std::uint64_t row_stride, std::uint64_t token_stride, std::uint64_t itemsize, std::uint64_t seed,
                             std::int64_t num_threads, const Sums& by_layer, const Sums& by_row) {
    std::vector<DigestAxis> inner;
    for (const auto& [count, stride, start] : axes) inner.push_back({count, stride, start});
    DigestParts parts;
    if (by_layer) parts.by_layer = view(*by_layer);
    if (by_row) parts.by_row = view(*by_row);
    const ReleaseGilToWork released;
    return digest({view(layers), view(bases), row_stride, token_stride, inner, itemsize, seed}, view(runs), num_threads, parts);
}

void bind_copies(nb::module_& m) {
    m.def("copy_batch", &copy_columns, "source"_a.noconvert(), "destination"_a.noconvert(), "nbytes"_a.noconvert(),
          "num_threads"_a = 1,
          "Copy nbytes[i] bytes from address source[i] to address destination[i]; three contiguous uint64 columns.\n\n"
          "Returns the number of bytes copied. Memory must be mapped and destinations disjoint, which is not checked.\n"
          "ValueError: columns of different lengths, or num_threads below 1.");
    m.def("total_nbytes", &total_nbytes, "nbytes"_a.noconvert(), "The sum of a contiguous uint64 column, modulo 2**64.");
    m.def("copy_between_processes", &copy_process_columns, "pid"_a, "local"_a.noconvert(), "remote"_a.noconvert(),
          "nbytes"_a.noconvert(), nb::kw_only(), "write"_a, "num_threads"_a = 1,
          "Copy between addresses of this process and of process `pid`, to it or from it; three columns of one length.\n\n"
          "Returns 0 or the system's error number. After an error any part may have been copied, and no copy is still\n"
          "running. Local memory must be mapped, which is not checked. ValueError: columns of different lengths, or\n"
          "num_threads below 1.");
    m.def("digest", &digest_columns, "layers"_a.noconvert(), "bases"_a.noconvert(), "runs"_a.noconvert(), "axes"_a,
          nb::kw_only(), "row_stride"_a, "token_stride"_a, "itemsize"_a, "seed"_a, "num_threads"_a = 1,
          "by_layer"_a.noconvert() = nb::none(), "by_row"_a.noconvert() = nb::none(),
          "Sum modulo 2**64 of every element times an odd weight for each of its global coordinates. Adds the parts of each\n"
          "layer and of each destination row to the arrays given.\n"
          "ValueError: columns of different lengths, empty runs, or an item size other than 1, 2, 4 or 8.");
}

}  // namespace

}  // namespace disagg::python

NB_MODULE(_native, m) {
    using namespace disagg::python;
    m.doc() = "Compiled core of disagg: functions on integer columns. They check the types of arguments, not their meaning.";
    pthread_atfork(nullptr, nullptr, [] { disagg::recount_busy_threads(); });
    // Objects may be left at the end: a daemon thread of the server holds a handle, a forked child holds its parent's managers.
    nb::set_leak_warnings(false);

    bind_group_runs<std::int64_t, std::int64_t>(m, kGroupRunsDoc);
    bind_group_runs<std::int32_t, std::int32_t>(m);
    bind_group_runs<std::int64_t, std::int32_t>(m);
    bind_group_runs<std::int32_t, std::int64_t>(m);
    bind_spans(m);
    bind_regions(m);
    bind_copies(m);
    bind_work_lists(m);
    bind_waiting(m);
}
