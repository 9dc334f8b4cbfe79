"""The compiler: a traced model and a cluster in, a placement and the programs of all ranks out."""
