"""The launcher of Intel Caffe: it checks all nodes, trains, and says whether all ranks trained together."""
