// Rules that find mistakes; form is prettier's, types are tsc's.
const globals = Object.fromEntries(
  [
    "document",
    "window",
    "location",
    "history",
    "matchMedia",
    "getComputedStyle",
    "setTimeout",
    "URL",
    "Blob",
    "navigator",
    "XMLSerializer",
  ].map((name) => [name, "readonly"]),
);

export default [
  {
    files: ["src/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      "consistent-return": "error",
      "default-case-last": "error",
      eqeqeq: ["error", "always", { null: "ignore" }],
      "no-constant-condition": "error",
      "no-control-regex": "error",
      "no-dupe-keys": "error",
      "no-else-return": "off",
      "no-eval": "error",
      "no-fallthrough": "error",
      "no-implicit-globals": "error",
      "no-loop-func": "error",
      "no-shadow": "error",
      "no-undef": "error",
      "no-unreachable": "error",
      "no-unused-vars": "error",
      "no-use-before-define": "off",
      "no-var": "error",
      "prefer-const": "error",
      "no-restricted-properties": [
        "error",
        { property: "innerHTML", message: "Text from outside must stay text." },
        { property: "outerHTML", message: "Text from outside must stay text." },
        { property: "insertAdjacentHTML", message: "Text from outside must stay text." },
      ],
    },
  },
];
