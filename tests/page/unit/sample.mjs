// A run small enough to add up by hand, in the form that gradscope/report/page/data.py writes.

const STRINGS = [
  "Net",
  "Block",
  "Linear",
  "body",
  "0",
  "1",
  "2",
  "fc",
  "ln_1",
  "ln_2",
  "LayerNorm",
  "backward",
  "MmBackward0",
  "forward",
  "aten::mm",
  "engine",
  "(engine)",
  "m.py",
  "forward",
  "y = x @ w",
  "accumulate",
];

/** @param {string} text */
const s = (text) => STRINGS.indexOf(text);

// Net: body.0 and body.1 alike (a Block with a Linear), body.2 a Block of another width, and two norms.
// layer            forward  backward
// ""                     1         2
// body                   0         0   never called
// body.0                 0        10
// body.0.fc              5        20
// body.1                 0        10
// body.1.fc              5        50
// body.2                 0         1
// body.2.fc              7         3   of another size
// ln_1                   1         2
// ln_2                   1         2
export function sample() {
  const rows = [
    [-1, "", "Net", 0, 1, 2, 1],
    [0, "body", "Block", 0, 0, 0, 0],
    [1, "0", "Block", 0, 0, 10, 1],
    [2, "fc", "Linear", 64, 5, 20, 1],
    [1, "1", "Block", 0, 0, 10, 1],
    [4, "fc", "Linear", 64, 5, 50, 1],
    [1, "2", "Block", 0, 0, 1, 1],
    [6, "fc", "Linear", 99, 7, 3, 1],
    [0, "ln_1", "LayerNorm", 8, 1, 2, 1],
    [0, "ln_2", "LayerNorm", 8, 1, 2, 1],
  ];
  const strings = [...STRINGS, ""];
  const zeros = rows.map(() => 0);
  const own = rows.map((row) => Number(row[5]));
  const accumulate = rows.map((_, i) => (i === 5 ? 4 : 0)); // 4 of the 50 of body.1.fc
  return {
    format: 1,
    strings,
    runs: [
      {
        gradscope: "0.1.0",
        partial: "",
        source: true,
        environment: { device: "cpu" },
        workload: { target: "m.py", model: "Net", steps: 2, warmup: 1 },
        measured: ["1 step"],
        step: { wall_ns: 127, forward_ns: 22, backward_ns: 105, optimizer_ns: 0, other_ns: 0, spread: {} },
        ledger_words: [
          ["layers_ns", "layers", ""],
          ["outside_modules_ns", "outside modules", ""],
          ["engine_ns", "autograd overhead", ""],
        ],
        ledger: {
          backward_ns: 105,
          layers_ns: 96,
          recompute_ns: 0,
          gradient_sum_ns: 0,
          hook_ns: 0,
          accumulate_ns: 4,
          outside_modules_ns: 0,
          communication_ns: 0,
          engine_ns: 5,
          unattributed_ns: 0,
        },
        odd: [],
        findings: [],
        nothing_found: [],
        headline: "",
        comment: "",
        notes: [],
        layers: {
          parent: rows.map((row) => row[0]),
          name: rows.map((row) => strings.indexOf(String(row[1]))),
          class: rows.map((row) => s(String(row[2]))),
          source: rows.map(() => -1),
          steps_ns: rows.map((_, i) => [own[i], own[i]]),
          tied: {},
          calls: rows.map((row) => row[6]),
          parameters: rows.map((row) => row[3]),
          forward_self_ns: rows.map((row) => row[4]),
          backward_self_ns: own.map((value, i) => value - accumulate[i]),
          recompute_ns: zeros,
          accumulate_ns: accumulate,
          gradient_sum_ns: zeros,
          hook_ns: zeros,
        },
        ops: {
          layer: [3, 5, 5, -1, 3],
          phase: [s("backward"), s("backward"), s("accumulate"), s("engine"), s("forward")],
          name: [s("MmBackward0"), s("MmBackward0"), s("aten::mm"), s("(engine)"), s("aten::mm")],
          shape: [-1, -1, -1, -1, -1],
          calls: [1, 1, 1, 1, 1],
          self_ns: [20, 46, 4, 5, 5],
        },
        kernels: { layer: [], phase: [], name: [] },
        lines: {
          file: [s("m.py")],
          function: [s("forward")],
          text: [s("y = x @ w")],
          layer: [5],
          line: [7],
          forward_ns: [10],
          backward_ns: [70],
        },
      },
    ],
  };
}
