"""What running a model on a GPU takes: staged inputs, captured graphs, memory that is measured."""
