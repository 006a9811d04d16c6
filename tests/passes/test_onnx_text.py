"""Models as text: what is written can be read again."""

import onnx_text

EVERYTHING = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[N,?,"2*N"] x, seq(float[2]) s, optional(float) o, bool c, float[] u) => (float y)
   <float16[2] half =  {15360,49152},
    double big =  {1e+300},
    float[3] special =  {inf,-inf,-3.4028235e+38},
    string[2] words = {"a b", "c"},
    bool[2] truth =  {1,0},
    float[0] none =  {},
    float[2] plugged,
    float[20,30] weight>
{
   ["a/b"] "x:0", z = local.gate <alpha: float = 0.1, sizes: ints = [1, 2]> (x, "", half)
   plugged = MyPlugin <kinds: strings = ["a", "b"], value: tensor = float[2] {1,-2}, empty: ints = []> ("x:0")
   y = If (c) <then_branch: graph = t () => (float v) {
      v = Neg (z)
   }, else_branch: graph = e () => (float w) {
      p = Neg (z)
      w = Neg (p)
   }>
}
<domain: "local", opset_import: ["" : 21]>
gate <alpha>(a, b, c) => (d, e)
{
   d = Elu <alpha: float = @alpha> (a)
   e = Neg (d)
}"""


def test_what_is_written_is_read_again() -> None:
    assert onnx_text.render(onnx_text.parse(EVERYTHING)) == EVERYTHING


def test_constants_without_values_are_random_and_the_same_each_time() -> None:
    first, second = (onnx_text.parse(EVERYTHING).graph.initializer for _ in range(2))
    assert {tensor.name: list(tensor.dims) for tensor in first}["weight"] == [20, 30]
    assert list(first) == list(second)
