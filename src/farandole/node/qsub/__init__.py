"""PBS job scripts for Slurm: qsub, qdel, and what runs a script in the environment of PBS."""
