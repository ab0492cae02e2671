// Which regions contain ranges of memory, against a search of all of them.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "regions.hpp"
#include "tests.hpp"

namespace {

using Words = std::vector<std::uint64_t>;

}  // namespace

void test_located_ranges(std::mt19937_64& random) {
    constexpr std::uint64_t kTop = std::numeric_limits<std::uint64_t>::max();
    for (int round = 0; round < 5000; ++round) {
        Words starts, stops, devices;
        // Regions may be adjacent, and the last one may end at the end of the address space.
        std::uint64_t at = random() % 2 == 0 ? random() % 20 : kTop - 300;
        for (std::size_t k = random() % 6; k > 0; --k) {
            at += random() % 3 * (random() % 10);
            starts.push_back(at);
            at += 1 + random() % 30;
            stops.push_back(at);
            devices.push_back(random() % 8);
        }
        const std::size_t count = random() % 20;
        Words addresses(count), nbytes(count);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t k = starts.empty() ? 0 : random() % starts.size();
            const bool inside = !starts.empty() && random() % 12 != 0;
            addresses[i] = inside ? starts[k] + random() % (stops[k] - starts[k]) : random();
            nbytes[i] = inside ? random() % (stops[k] - addresses[i] + 1) : random() % 9 == 0 ? random() : random() % 40;
        }
        const auto holds = [&](std::size_t k, std::size_t i) {  // without a sum that could wrap
            return starts[k] <= addresses[i] && addresses[i] <= stops[k] && stops[k] - addresses[i] >= nbytes[i];
        };
        const auto held = [&](std::size_t i) {
            for (std::size_t k = 0; k < starts.size(); ++k) {
                if (holds(k, i)) return true;
            }
            return false;
        };
        std::size_t expected = 0;
        while (expected < count && held(expected)) ++expected;

        const disagg::RegionColumns regions{starts, stops, devices};
        const disagg::RangeColumns ranges{addresses, nbytes};
        // Outputs of exactly the size requested, so that the sanitizers see a write beyond it. Entries from the first range
        // that no region contains must not change.
        std::vector<std::int64_t> where(count, -7);
        std::vector<disagg::Descriptor> rows(count, {7, 7, 7});
        CHECK(disagg::locate(regions, ranges, where) == expected);
        CHECK(disagg::describe(regions, ranges, rows) == expected);
        CHECK(disagg::count_held(regions, ranges) == expected);
        for (std::size_t i = 0; i < count; ++i) {
            if (i >= expected) {
                CHECK(where[i] == -7 && rows[i].address == 7 && rows[i].nbytes == 7 && rows[i].device == 7);
                continue;
            }
            const auto k = static_cast<std::size_t>(where[i]);
            CHECK(where[i] >= 0 && k < starts.size() && holds(k, i));
            CHECK(rows[i].address == addresses[i] && rows[i].nbytes == nbytes[i] && rows[i].device == devices[k]);
        }

        // As blocks of a few bytes, in lists of a few blocks, counted one by one.
        const std::uint64_t size = 1 + random() % 4, per_list = 1 + random() % 9;
        Words firsts;
        std::uint64_t num_blocks = 0;
        for (std::size_t k = 0; k < starts.size(); ++k) {
            firsts.push_back(num_blocks);
            num_blocks += (stops[k] - starts[k]) / size;
        }
        const auto number = [&](std::size_t i) {
            for (std::size_t k = 0; k < starts.size(); ++k) {
                for (std::uint64_t nth = 0; nth < (stops[k] - starts[k]) / size; ++nth) {
                    if (addresses[i] == starts[k] + nth * size && nbytes[i] == size) return firsts[k] + nth;
                }
            }
            return kTop;
        };
        if (random() % 2 == 0 && !starts.empty()) {  // each range is a block, except in regions shorter than one
            for (std::size_t i = 0; i < count; ++i) {
                const std::size_t k = random() % starts.size();
                const std::uint64_t most = (stops[k] - starts[k]) / size;
                addresses[i] = starts[k] + (most == 0 ? 0 : random() % most * size);
                nbytes[i] = size;
            }
        }
        std::vector<std::int32_t> lists(count), indices(count);
        std::int32_t highest = 0;
        for (std::size_t i = 0; i < count; ++i) {
            if (number(i) == kTop) highest = -1;
            if (highest >= 0) highest = std::max(highest, static_cast<std::int32_t>(number(i) / per_list));
        }
        CHECK(disagg::place_blocks(regions, ranges, {size, per_list, firsts}, {lists, indices}) == highest);
        for (std::size_t i = 0; i < count && highest >= 0; ++i) {
            const auto list = static_cast<std::uint64_t>(lists[i]), index = static_cast<std::uint64_t>(indices[i]);
            CHECK(list * per_list + index == number(i) && index < per_list);
        }
    }
}

void test_refused_ranges() {
    const Words one{1}, two{1, 2};
    std::vector<std::int64_t> room(1);
    const auto refused = [&](const disagg::RegionColumns& regions, const disagg::RangeColumns& ranges) {
        return refuses([&] { disagg::locate(regions, ranges, room); });
    };
    CHECK(refused({one, two, one}, {one, one}));
    CHECK(refused({one, one, two}, {one, one}));
    CHECK(refused({one, one, one}, {one, two}));
    CHECK(refused({one, one, one}, {two, two}));
    CHECK(!refused({two, two, two}, {one, one}));
}
