"""The texts around the parameters in the files of cc/cuda/calibration (tools/calibrate.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence

# The file of the GPU with the most times, on which the others depend.
HEADER = """\
// Calibration of predicted times, written by "python tools/calibrate.py" from the times in
// tests/cc/measured_times.tsv; never edited. A GPU without a file takes this one, scaled by its
// own rates. The times:
//
{facts}
//
// EXPOSED(share of the terms beside the longest that nothing hides)
// UNFITTED_US(fixed us of forms without their own), XLA_US(the same of XLA's convolutions)
// FORM(form, operations, operands, share of the SM's rates, share of the DRAM rate, fixed us)
//   // measured rows; least, median and greatest predicted / measured
// LIKE(form, operations, operands; the same of the form whose parameters it takes, because it has
//   less than {own_rows} measured rows)
//
// Not fitted: fixed in forms with less than {rows} rows or none shorter than {short:g} us, and in
// most classes of XLA's convolutions; DRAM share 1 in forms with the same ratio of FLOPs to bytes
// in all rows. Left out: the default, and shares of 1 before it.
#ifndef EXPOSED
#define EXPOSED(...)
#endif
#ifndef UNFITTED_US
#define UNFITTED_US(...)
#endif
#ifndef XLA_US
#define XLA_US(...)
#endif
#ifndef FORM
#define FORM(...)
#endif
#ifndef LIKE
#define LIKE(...)
#endif
"""

FOOTER = """\
#undef LIKE
#undef FORM
#undef XLA_US
#undef UNFITTED_US
#undef EXPOSED
"""

# The file of a GPU with a prior.
SMALL_HEADER = """\
// Calibration of predicted times, written by "python tools/calibrate.py" from the times in
// tests/cc/{table}; never edited. The times:
//
{facts}
//
// FORM(form, operations, operands, share of the SM's rates, share of the DRAM rate, fixed us)
//   // measured rows; least, median and greatest predicted / measured
//
// A few rows move the parameters of {base}.def, the prior, as far as they agree about it; those of
// the nearest form, where {base}.def has no line. Where it has no LIKE either, this line serves the
// {base} and all GPUs without a file.
// What has no line here is that of {base}.def: forms with less than {least_rows} rows, the exposed
// share, default fixed times, LIKE.
"""
SMALL_FOOTER = "#undef FORM\n"


def like(name: Sequence[str], near: Sequence[str]) -> str:
    """The line of a form that takes another's parameters."""
    words = ", ".join(json.dumps(word) for word in (*name, *near))
    return f"LIKE({words})"
