// SPDX-License-Identifier: Apache-2.0
// Arrays in, arrays out: the core as Python sees it (lowtide._core). There is
// no logic here; the GIL is released while the core works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "effort.h"
#include "frontier.h"
#include "greedy.h"
#include "lowtide.h"
#include "placement.h"
#include "sweep.h"
#include "timeline.h"

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

template <typename T>
using Row = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> ToVector(const Row<T>& row) {
  return {row.data(), row.data() + row.size()};
}

Simulator MakeSimulator(const Row<double>& seconds, const In& plain,
                        const In& bytes, const Row<int>& start,
                        const Row<int>& stop, const Row<double>& replay,
                        const In& replay_from, const Row<std::int8_t>& ways,
                        double write, double read,
                        double tax, const Row<int>& first_parent,
                        const Row<int>& parents, int longest_chain) {
  const std::size_t m = bytes.size();
  if (start.size() != m || stop.size() != m || replay.size() != m ||
      replay_from.size() != m || ways.size() != m) {
    throw std::invalid_argument("the columns of the values differ in length");
  }
  Iteration it{.seconds = ToVector(seconds),
               .plain = {plain.data(), plain.data() + plain.size()},
               .values = {},
               .write = write,
               .read = read,
               .tax = tax,
               .first_parent = ToVector(first_parent),
               .parents = ToVector(parents),
               .longest_chain = longest_chain};
  it.values.reserve(m);
  for (std::size_t i = 0; i < m; ++i) {
    it.values.push_back({bytes.data()[i], start.data()[i], stop.data()[i],
                         replay.data()[i], (ways.data()[i] & 1) != 0,
                         (ways.data()[i] & 2) != 0, replay_from.data()[i]});
  }
  return Simulator(std::move(it));
}

nb::tuple AsTuple(const Outcome& o) {
  return nb::make_tuple(o.excess, o.stuck, o.peak, o.moved, o.seconds,
                        o.waited, o.replayed, o.taxed);
}

std::vector<nb::tuple> RunEach(Simulator& simulator,
                               const Table<std::int8_t>& plans, Bytes level) {
  const std::size_t m = plans.shape(1);
  if (m != static_cast<std::size_t>(simulator.values()))
    throw std::invalid_argument("a plan has one code a value");
  std::vector<Outcome> outcomes(plans.shape(0));
  {
    nb::gil_scoped_release release;
    for (std::size_t p = 0; p < outcomes.size(); ++p)
      outcomes[p] = simulator.Run({plans.data() + p * m, m}, level);
  }
  std::vector<nb::tuple> rows;
  for (const Outcome& outcome : outcomes) rows.push_back(AsTuple(outcome));
  return rows;
}

// Plans one after another, in one row; then how many there are.
std::pair<Out<std::int8_t>, std::size_t> Frontier(Simulator& simulator,
                                                  const In& levels,
                                                  std::int64_t effort) {
  const std::vector<Bytes> steps(levels.data(), levels.data() + levels.size());
  std::vector<std::int8_t> row;
  std::size_t count = 0;
  {
    nb::gil_scoped_release release;
    for (const auto& codes : FindFrontier(simulator, steps, effort)) {
      row.insert(row.end(), codes.begin(), codes.end());
      ++count;
    }
  }
  return {ToArray(std::move(row)), count};
}

}  // namespace
}  // namespace lowtide

NB_MODULE(_core, m) {
  // Sessions may outlive the interpreter's orderly end; that is no leak to report.
  nb::set_leak_warnings(false);
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
  nb::class_<lowtide::Simulator>(m, "Simulator",
                                 "One iteration on a simulated timeline.")
      .def("run", &lowtide::RunEach, nb::arg("plans"), nb::arg("level"),
           "Give (excess, stuck, peak, moved, seconds, waited, replayed, "
           "taxed) of each row of codes.")
      .def("frontier", &lowtide::Frontier, nb::arg("levels"), nb::arg("effort"),
           "Find the fastest plan for each level: (their codes, how many).")
      .def("begins", [](const lowtide::Simulator& self) {
             return lowtide::ToArray(self.begins());
           },
           "Of the latest run: the operators before which reads begin, or -1.")
      .def("ends", [](const lowtide::Simulator& self) {
             return lowtide::ToArray(self.ends());
           },
           "Of the latest run: the operators at which values are back.")
      .def("floor", [](const lowtide::Simulator& self) {
             return lowtide::ToArray(self.floor());
           },
           "The least load that each operator can be brought to.");
  m.def("simulator", &lowtide::MakeSimulator, nb::arg("seconds"),
        nb::arg("plain"), nb::arg("sizes"), nb::arg("start"), nb::arg("stop"),
        nb::arg("replay"), nb::arg("replay_from"), nb::arg("ways"),
        nb::arg("write"), nb::arg("read"),
        nb::arg("tax"), nb::arg("first_parent"), nb::arg("parents"),
        nb::arg("longest_chain"), "Lay an iteration out; bits of `ways`: may "
        "be swapped (1), may be computed again (2).");
}
