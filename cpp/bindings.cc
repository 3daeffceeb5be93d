// SPDX-License-Identifier: Apache-2.0
// Arrays in, arrays out: the core as Python sees it (lowtide._core). There is
// no logic here; the GIL is released while the core works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "lowtide.h"
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

}  // namespace
}  // namespace lowtide

NB_MODULE(_core, m) {
  m.doc() = "The planner's core: live bytes, independent parts, placement.";
  m.def("live_bytes", &lowtide::LiveCurve, nb::arg("born"), nb::arg("dead"),
        nb::arg("bytes"), nb::arg("period") = 0,
        "Give the live bytes from each birth on: (times, bytes).");
  m.def("independent_parts", &lowtide::Parts, nb::arg("born"),
        nb::arg("dead"), nb::arg("bytes"), nb::arg("period") = 0,
        "Number the part of time each block belongs to; parts do not touch.");
}
