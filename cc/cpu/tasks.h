// The division of a convolution into tasks. The rows of all images form one sequence, divided into
// one run for each task; a run holds the end of an image, whole images, and the beginning of an
// image. Tasks therefore have equal size for any number of images and threads.
#ifndef JAXCONV_CPU_TASKS_H_
#define JAXCONV_CPU_TASKS_H_

#include <cstdint>
#include <vector>

#include "core/conv_problem.h"
#include "cpu/geometry.h"

namespace jaxconv::cpu {

// The work of one execution of a primitive: consecutive rows of an image, or several whole images,
// of one independent convolution.
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
  ConvProblem sub;  // the region as a separate convolution; n is 0 if there is nothing to sum
  ConvProblem images_to_copy;  // if images are copied: the region before the copy, with its padding
};

using Tasks = std::vector<std::vector<Region>>;

// The rows that are divided: rows of the operation's output, or of y for a weight gradient.
int64_t DividedRows(const Geometry& geometry);

// Regions have at most `max_rows` rows of an image or, if that covers an image, at most
// `max_images` images.
Tasks MakeTasks(const Geometry& geometry, int64_t tasks, int64_t max_rows, int64_t max_images);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_TASKS_H_
