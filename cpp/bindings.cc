// SPDX-License-Identifier: Apache-2.0
// Arrays in, arrays out: the core as Python sees it (lowtide._core). There is
// no logic here; the GIL is released while the core works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "effort.h"
#include "greedy.h"
#include "lowtide.h"
#include "placement.h"
#include "sweep.h"

namespace nb = nanobind;

namespace lowtide {
namespace {

using In = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig,
                       nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
Out<T> ToArray(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept {
    delete static_cast<std::vector<T>*>(p);
  });
  return Out<T>(kept->data(), {kept->size()}, owner);
}

Problem ToProblem(const In& born, const In& dead, const In& bytes,
                  Time period) {
  if (born.size() != dead.size() || born.size() != bytes.size()) {
    throw std::invalid_argument("born, dead and bytes differ in length");
  }
  if (period < 0) throw std::invalid_argument("the period is negative");
  Problem problem{.blocks = {}, .period = period};
  problem.blocks.reserve(born.size());
  for (std::size_t i = 0; i < born.size(); ++i) {
    problem.blocks.push_back({{born.data()[i], dead.data()[i]},
                              bytes.data()[i]});
  }
  Validate(problem);
  return problem;
}

std::pair<Out<Time>, Out<Bytes>> LiveCurve(const In& born, const In& dead,
                                           const In& bytes, Time period) {
  const Problem problem = ToProblem(born, dead, bytes, period);
  Sections sections;
  std::vector<Bytes> live;
  {
    nb::gil_scoped_release release;
    sections = CutAtBirths(problem);
    live = LiveBytes(problem, sections);
  }
  return {ToArray(std::move(sections.starts)), ToArray(std::move(live))};
}

Out<int> Parts(const In& born, const In& dead, const In& bytes, Time period) {
  const Problem problem = ToProblem(born, dead, bytes, period);
  std::vector<int> parts;
  {
    nb::gil_scoped_release release;
    int count = 0;
    parts = IndependentParts(CutAtBirths(problem), &count);
  }
  return ToArray(std::move(parts));
}

// Set from any thread; a search that was given it ends soon after.
struct Cancel {
  std::atomic<bool> set{false};
};

Limits::Clock::time_point After(std::optional<double> seconds) {
  // A year is for ever, and does not overflow the clock.
  constexpr double kLongest = 365.0 * 24 * 3600;
  if (!seconds || *seconds > kLongest) return Limits::Clock::time_point::max();
  return Limits::Clock::now() +
         std::chrono::duration_cast<Limits::Clock::duration>(
             std::chrono::duration<double>(*seconds));
}

Out<Bytes> FitInOrder(const In& born, const In& dead, const In& bytes,
                      const In& order, bool best, Time period) {
  const Problem problem = ToProblem(born, dead, bytes, period);
  std::vector<int> ranks;
  std::vector<bool> seen(problem.blocks.size(), false);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t block = order.data()[i];
    if (block < 0 || block >= static_cast<std::int64_t>(seen.size()) ||
        seen[block]) {
      throw std::invalid_argument("order is not a permutation of the blocks");
    }
    seen[block] = true;
    ranks.push_back(static_cast<int>(block));
  }
  if (ranks.size() != seen.size()) {
    throw std::invalid_argument("order is not a permutation of the blocks");
  }
  Placement placement;
  {
    nb::gil_scoped_release release;
    Limits limits = Limits::None();
    placement = *PlaceInOrder(problem, CutAtBirths(problem), ranks,
                              best ? Fit::kBest : Fit::kFirst, limits);
  }
  return ToArray(std::move(placement.offsets));
}

std::tuple<Out<Bytes>, Bytes, std::int64_t, bool> Search(
    const In& born, const In& dead, const In& bytes, Time period, Bytes enough,
    std::uint64_t seed, std::int64_t nodes, std::optional<double> seconds,
    const Cancel* cancel) {
  const Problem problem = ToProblem(born, dead, bytes, period);
  Limits limits(nodes, After(seconds), cancel ? &cancel->set : nullptr);
  Found found;
  {
    nb::gil_scoped_release release;
    found = Place(problem, {enough, seed}, limits);
  }
  return {ToArray(std::move(found.placement.offsets)), found.lower_bound,
          limits.spent(), found.aborted};
}

}  // namespace
}  // namespace lowtide

NB_MODULE(_core, m) {
  m.doc() = "The planner's core: live bytes, independent parts, placement.";
  m.def("live_bytes", &lowtide::LiveCurve, nb::arg("born"), nb::arg("dead"),
        nb::arg("sizes"), nb::arg("period") = 0,
        "Give the live bytes from each birth on: (times, bytes).");
  m.def("independent_parts", &lowtide::Parts, nb::arg("born"),
        nb::arg("dead"), nb::arg("sizes"), nb::arg("period") = 0,
        "Number the part of time each block belongs to; parts do not touch.");
  m.def("fit", &lowtide::FitInOrder, nb::arg("born"), nb::arg("dead"),
        nb::arg("sizes"), nb::arg("order"), nb::arg("best") = false,
        nb::arg("period") = 0,
        "Give offsets by first or best fit, the blocks taken in this order.");
  nb::class_<lowtide::Cancel>(m, "Cancel", "Ends a search from outside.")
      .def(nb::init<>())
      .def("set", [](lowtide::Cancel& self) { self.set = true; },
           "End the searches that hold this flag, from any thread.");
  m.def("place", &lowtide::Search, nb::arg("born"), nb::arg("dead"),
        nb::arg("sizes"), nb::arg("period") = 0, nb::arg("enough") = 0,
        nb::arg("seed") = 0, nb::arg("nodes") = 1 << 20,
        nb::arg("seconds") = nb::none(), nb::arg("cancel") = nb::none(),
        "Search offsets: (offsets, lower bound, nodes spent, aborted).");
}
