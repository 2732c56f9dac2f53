from benchmarks.peers.compare import main

raise SystemExit(main())
