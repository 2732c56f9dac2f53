// What the machine does by itself, measured through a team: reads, and threads that meet.
#pragma once
#include "parallel.h"

namespace ridgeline {

// Bytes a second that the team reads of a buffer of `bytes`, split among its threads; the best of several passes, each of
// which goes through the buffer `repeats` times, so that a small one is read from the cache that holds it.
double read_bandwidth(Team& team, int64_t bytes, int64_t repeats);
// Seconds of one barrier within a run, and of one run that does nothing; the best of several passes.
double barrier_seconds(Team& team);
double fork_seconds(Team& team);

}  // namespace ridgeline
