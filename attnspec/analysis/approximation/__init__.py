"""How far mechanisms are from softmax attention."""
