from benchmarks.soak.run import main

raise SystemExit(main())
