module modelswarm.io/tools/devcluster/programs/pause

go 1.26.0
