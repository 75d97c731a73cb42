// Computes the start of each task, and the regions up to the start of the next.
#include "cpu/tasks.h"

#include <algorithm>

namespace jaxconv::cpu {
namespace {

// Sets the region to rows [begin, end) of one image, as a separate convolution.
void SetRows(const Geometry& g, int64_t begin, int64_t end, Region* region) {
  const ConvProblem& p = g.p;
  int a = g.axis;
  bool dgrad = p.op == Op::kDgrad;
  int64_t stride = p.stride[a], pad = p.pad_lo[a];
  int64_t reach = (p.filter[a] - 1) * p.dilation[a];
  int64_t x_begin, x_end, y_begin, y_end;
  if (dgrad) {
    x_begin = begin, x_end = end;
    y_begin = std::max<int64_t>(0, CeilDiv(begin + pad - reach, stride));
    y_end = std::min(p.out[a], FloorDiv(end - 1 + pad, stride) + 1);
  } else {
    y_begin = begin, y_end = end;
    x_begin = std::max<int64_t>(0, begin * stride - pad);
    x_end = std::min(p.in[a], (end - 1) * stride + reach + 1 - pad);
  }
  int64_t x_row = p.c, y_row = p.k;
  for (int axis = a + 1; axis < 3; ++axis) x_row *= p.in[axis], y_row *= p.out[axis];
  region->row_begin = begin;
  region->row_end = end;
  region->sub = p;
  region->sub.batch = 1;
  region->sub.n = 1;
  region->x_offset = (region->image * p.in[a] + x_begin) * x_row;
  region->y_offset = (region->image * p.out[a] + y_begin) * y_row;
  if (x_begin >= x_end || y_begin >= y_end) {
    region->zero_elements = p.op == Op::kWgrad ? 0 : (end - begin) * (dgrad ? x_row : y_row);
    region->sub.n = 0;
    return;
  }
  ConvProblem& sub = region->sub;
  sub.in[a] = x_end - x_begin;
  sub.out[a] = y_end - y_begin;
  sub.pad_lo[a] = pad + x_begin - y_begin * stride;
  sub.pad_hi[a] = (sub.out[a] - 1) * stride + reach + 1 - sub.in[a] - sub.pad_lo[a];
}

void SetImages(const Geometry& g, int64_t images, Region* region) {
  const ConvProblem& p = g.p;
  region->images = images;
  region->row_end = DividedRows(g);
  region->sub = p;
  region->sub.batch = 1;
  region->sub.n = images;
  region->x_offset = region->image * p.in_pixels() * p.c;
  region->y_offset = region->image * p.out_pixels() * p.k;
}

// The start of a task.
struct Start {
  int64_t image, row;
};

Start StartOf(const Geometry& g, int64_t task, int64_t tasks) {
  const ConvProblem& p = g.p;
  int64_t rows = DividedRows(g), total = p.batch * p.n * rows;
  if (task == tasks) return {p.batch * p.n, 0};
  // Starts are rounded to an eighth of a task, for fewer different regions at no more than 12 %
  // imbalance.
  int64_t quantum = std::clamp<int64_t>(total / (tasks * 8), 1, rows);
  // A data gradient is divided at the start of an output row's window, so that no region has
  // negative padding.
  int64_t step = p.op == Op::kDgrad ? p.stride[g.axis] : 1;
  int64_t remainder = p.op == Op::kDgrad ? p.pad_lo[g.axis] % step : 0;
  int64_t at = task * total / tasks;
  int64_t image = at / rows;
  int64_t row = (at % rows + quantum / 2) / quantum * quantum;
  if (row == 0) return {image, 0};
  row = (row + remainder + step / 2) / step * step - remainder;
  if (row <= 0) return {image, 0};
  if (row >= rows) return {image + 1, 0};
  return {image, row};
}

}  // namespace

int64_t DividedRows(const Geometry& g) {
  return g.p.op == Op::kDgrad ? g.p.in[g.axis] : g.p.out[g.axis];
}

Tasks MakeTasks(const Geometry& g, int64_t task_count, int64_t max_rows, int64_t max_images) {
  const ConvProblem& p = g.p;
  int64_t rows = DividedRows(g);
  // Several images form one region if no row is cropped between them.
  bool by_image = p.pad_lo[g.axis] < 0 || p.pad_hi[g.axis] <= -p.stride[g.axis] || max_rows < rows;
  Tasks tasks(task_count);
  for (int64_t task = 0; task < task_count; ++task) {
    auto [image, row] = StartOf(g, task, task_count);
    auto [last_image, last_row] = StartOf(g, task + 1, task_count);
    while (image < last_image || (image == last_image && row < last_row)) {
      Region region;
      region.image = image;
      region.batch = image / p.n;
      if (row > 0 || image == last_image || by_image) {
        int64_t left = (image == last_image ? last_row : rows) - row;
        int64_t end = row + CeilDiv(left, CeilDiv(left, max_rows));  // equal regions
        SetRows(g, row, end, &region);
        row = end;
        if (row == rows) ++image, row = 0;
      } else {
        const int64_t images = std::min(last_image, (region.batch + 1) * p.n) - image;
        SetImages(g, std::min(images, max_images), &region);
        image += region.images;
      }
      tasks[task].push_back(region);
    }
  }
  return tasks;
}

}  // namespace jaxconv::cpu
