from benchmarks.servers.compare import main

raise SystemExit(main())
