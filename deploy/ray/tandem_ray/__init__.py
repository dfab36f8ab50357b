"""Ray Serve application of Tandem: each replica is a supervisor with its engine core and frontends."""
