"""A server among many clients that misbehave, for as long as you like: what breaks, what leaks, what stalls.

    python -m benchmarks.soak [MODEL] [--clients 200] [--seconds 600] [--json FILE] [--serve-args FLAGS]

`ridgeline serve` runs in a process of its own. First it answers 50 prompts alone, greedily. Then the clients ask for these
again, streamed and not, and among that go away in the middle, send nonsense, prompts that do not fit, and prompts of three
quarters of the context; another process asks /health 50 times a second, and the server's memory is noted every two seconds.
Then everything must be idle. In the end the clients begin again and the server gets SIGTERM in the middle. It fails where

    * an answer differs from the one given alone, ends early, or never comes; nonsense gets anything but a 400
    * memory grows: the median of the last quarter of the samples over that of the second by more than 2 % and 16 MB
    * a page, a seat or an open connection is not given back
    * the 99th percentile of /health is 50 ms or more
    * a request that was sent before SIGTERM is not answered in full, or the server's exit code is not 0
    * the server logs an error
"""
