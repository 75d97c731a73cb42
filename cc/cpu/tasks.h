// The division of a convolution into tasks. The rows of all images form one sequence, which is
// divided into one run per task; a run holds the end of an image, whole images, and the beginning
// of an image. Tasks are therefore equally large for any number of images and threads.
#ifndef JAXCONV_CPU_TASKS_H_
#define JAXCONV_CPU_TASKS_H_

#include <cstdint>
#include <vector>

#include "core/conv_problem.h"
#include "cpu/geometry.h"

namespace jaxconv::cpu {

// Consecutive rows of one image, or several whole images, of one of the independent convolutions:
// what one execution of a primitive computes.
struct Region {
  int primitive = -1;  // none: the output rows are zero
  int64_t batch = 0;
  int64_t image = 0;  // counted over all independent convolutions
  int64_t images = 1;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t x_offset = 0;  // in elements
  int64_t y_offset = 0;
  int64_t zero_elements = 0;
  ConvProblem sub;  // the region as a convolution of its own; n is 0 where there is nothing to sum
  ConvProblem images_to_copy;  // where images are copied: the region before, with its padding
};

using Tasks = std::vector<std::vector<Region>>;

// The rows that are divided: those of the operation's output, and those of y for a weight gradient.
int64_t DividedRows(const Geometry& geometry);

// Regions have at most `max_rows` rows of an image or, where that is all of them, `max_images`
// images.
Tasks MakeTasks(const Geometry& geometry, int64_t tasks, int64_t max_rows, int64_t max_images);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_TASKS_H_
