"""What is wrong with a machine that Diptych shall run on: `facts` looks, `rules` judges what was seen."""
